"""What we tell Ray Serve: where replicas are placed and how many there are.

Read first: `deployments.serve.placement`.
"""
