"""The trainer deployment: its serial queue, its worker processes, and its publishers of weights and adapters.

`trainer` runs in the Serve replica, without torch; the rest in its ranks, one Ray actor each. Models, losses
and optimizers are in `trainers`, the moving of bytes in `deployments.weights.transports`.

Read first: `deployments.trainer.trainer`, then `worker_group` and `worker`.
"""
