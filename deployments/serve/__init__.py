"""What we tell Ray Serve: where replicas are placed and how many there are.

The choice of a replica for a request is `deployments.router.policy`. Read first: `placement`.
"""
