"""Which replica gets a request.

`policy` decides, without Ray, clock and I/O, from what replicas report and what this router knows, and says
what a request weighs. `affinity` remembers which replica was sent which beginning of a prompt.
`request_router` is Serve's extension point around the policy, and `chooser` asks Serve for the choice.

Not here: what happens to the request then (`deployments.router.forwarding`).

Read first: `deployments.router.choice.policy`.
"""
