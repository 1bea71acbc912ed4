"""The replica: one whole vLLM server behind one Serve replica.

Runs in each replica of the `rollout` Serve deployment; `engine_core` runs in vLLM's engine core processes,
which the replica starts. It follows the controller instruction by instruction, commits between two decoding
steps, and answers requests on an HTTP port of its own.

Not here: what happens to weights inside vLLM's workers (`deployments.weights.staging`), which replica a
request goes to (`deployments.router`), when a round commits (`deployments.ledger`).

Read first: `deployments.replica.replica`, then `follower` and `staged_member`.
"""
