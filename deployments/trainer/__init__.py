"""The trainer deployment: its serial queue, its worker processes, and its publishers of weights and adapters.

`trainer` runs in the one replica of the `trainer` Serve deployment, without torch. Everything else runs in
its ranks, one Ray actor each (`worker_group`): `worker` trains all weights, `adapter_worker` an adapter.

Not here: models, losses and optimizers (`trainers`, without Ray), and how bytes move
(`deployments.weights.transports`).

Read first: `deployments.trainer.trainer`, then `worker_group` and `worker`.
"""
