"""The pure state machine: who is a member, which version the fleet is at, and who does what next.

One `State` and functions that change it. Runs inside the controller's process, and in tests without one. Time
is an argument, there is no I/O, and nothing waits: a caller gets a `PendingCall` that a later event
completes. What must survive a restart is a decision. Clocks, disks and waiting belong to
`deployments.controller`.

Imports the standard library, pydantic and `deployments.protocol`. Read first: `ledger`, then `staging_phase`.
"""
