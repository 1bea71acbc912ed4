"""Slipstream's HTTP routes, served by the replicas of the `router` deployment. vLLM's routes are forwarded by
`deployments.router`.

Read first: `app.http.ingress`.
"""
