"""The pure state machine: who is a member, which version the fleet is at, and who does what next.

Runs inside the controller's process, and in tests without one. Time is an argument, there is no I/O, and
nothing waits: a caller gets a `PendingCall` that a later event completes. What must survive a restart is
appended as a decision.

Imports the standard library, pydantic and `deployments.protocol`; never torch, vLLM, Ray or another package
of ours. Clocks, disks and waiting belong to `deployments.controller`.

Read first: `deployments.ledger.ledger`, then `deployments.ledger.rounds`.
"""
