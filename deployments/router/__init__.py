"""The router: chooses a replica per request, forwards it, and streams the response back.

Runs in the replicas of the `router` deployment, below the routes of `app.http`. Replicas make the final
admission check.

    router ─► request_inspection ─► forwarding ─► Serve ─► request_router ─► replica_policy, affinity
                     │ a list of prompts  ▲  │
                     └───────► parts ─────┘  └─► http_client ─► replica

Read first: `replica_policy`, then `router`.
"""
