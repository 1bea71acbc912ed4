"""Slipstream's own HTTP routes: fleet, weights, training, metrics, the web page, tokens.

Runs in the replicas of the `router` Serve deployment; routes call the controller and the trainer through
Serve handles. Other requests are forwarded by `deployments.router`. Read first: `app.http.ingress`.
"""
