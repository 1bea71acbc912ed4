"""The pure state machine: one `State` and functions that change it.

Time is an argument and nothing waits: a caller gets a `PendingCall` that a later event completes. Clocks,
disks and waiting belong to `deployments.controller`. Read first: `deployments.ledger.ledger`.
"""
