"""Committed versions on disk, as ordinary Hugging Face checkpoint directories, and those who write them.

The writers run in rank 0 of the trainer (`version_writer`) or, for an outside publisher, in one worker of one
replica (`retained`); the controller and joining replicas read. All writing is off the critical path.

Not here: which version is committed and who shall write it (`deployments.ledger`).

Read first: `deployments.weights.store.versions`.
"""
