"""The replica: one whole vLLM server behind one Serve replica.

Runs in each replica of the `rollout` Serve deployment; `engine_core` runs in vLLM's engine core processes. It
follows the controller's instructions, commits between two decoding steps, and serves HTTP on its own port.

Not here: staging in vLLM's workers (`deployments.weights.staging`), routing (`deployments.router`), when a
round commits (`deployments.ledger`).

Read first: `deployments.replica.replica`, then `follower` and `staged_member`.
"""
