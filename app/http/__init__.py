"""Slipstream's own HTTP routes: fleet, weights, training, metrics, the web page, tokens.

Runs in the replicas of the `router` Serve deployment. Routes call the controller and the trainer through
Serve handles, and raise the errors that these do. Other requests are forwarded by `deployments.router`.

Read first: `app.http.ingress`.
"""
