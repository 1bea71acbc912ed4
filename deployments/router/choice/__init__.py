"""Which replica gets a request.

`policy` decides, without Ray, clock and I/O, from what replicas report and what this router knows. `prefixes`
makes hashes of the beginning of a prompt, `affinity` remembers which replica was sent what, `load` says what
a request weighs. `request_router` is Serve's extension point around the policy, and `chooser` asks Serve for
the choice. Not here: what happens to the request then (`deployments.router.forwarding`).

Read first: `deployments.router.choice.policy`.
"""
