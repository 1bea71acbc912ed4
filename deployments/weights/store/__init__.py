"""Checkpoints on disk: committed versions and who writes them, adapters, and checkpoints that users wrote.

`version_writer` runs in rank 0 of the trainer or, for an external publisher, in one worker of one replica.
The controller and joining replicas read. All writing is off the critical path.

Not here: which version is committed and who writes it (`deployments.ledger`).

Read first: `deployments.weights.store.versions`.
"""
