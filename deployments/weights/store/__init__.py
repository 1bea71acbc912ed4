"""Checkpoints on disk: committed versions, adapters, and checkpoints that users wrote.

`version_writer` runs in rank 0 of the trainer or, for an external publisher, in one worker of one replica;
the controller and joining replicas read. Which version is committed and who writes it: `deployments.ledger`.

Read first: `deployments.weights.store.versions`.
"""
