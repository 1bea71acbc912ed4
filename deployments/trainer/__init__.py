"""The trainer deployment: its queue, its group of worker processes, and the publisher.

`trainer` runs in the one replica of the `trainer` Serve deployment, without torch. `worker`, `publisher`,
`snapshots`, `checkpoints` and `fleet_client` run in its ranks, one Ray actor each (`worker_group`).

Not here: models, losses and optimizers (`trainers`, without Ray), how bytes move
(`deployments.weights.transports`), and any code of the replica, the router or the controller: the
controller is called through a Serve handle (`deployments.calls.publish_session`).

Read first: `deployments.trainer.trainer`, then `worker_group` and `publisher`.
"""
