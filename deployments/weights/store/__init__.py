"""Committed versions on disk, as ordinary Hugging Face checkpoint directories, and those who write them.

`version_writer` runs in rank 0 of the trainer or, for an outside publisher, in one worker of one replica,
which has the tensors in `retained`. The controller and joining replicas read. All writing is off the critical
path.

Not here: which version is committed and who shall write it (`deployments.ledger`).

Read first: `deployments.weights.store.versions`.
"""
