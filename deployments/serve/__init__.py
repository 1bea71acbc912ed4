"""Placement and number of replicas, and metrics, in terms of Ray Serve.

Read first: `deployments.serve.placement`.
"""
