"""The router: chooses a replica for each request, forwards it, and streams the response back.

Runs in the replicas of the `router` Serve deployment, under the routes of `app.http`. The replica's own
admission check (`deployments.replica`) has the last word.

    router ─► request_inspection ─► forwarding ─► Serve ─► request_router ─► replica_policy, affinity
                     │ a list of prompts  ▲  │
                     └───────► parts ─────┘  └─► http_client ─► replica

Read first: `replica_policy`, then `router`.
"""
