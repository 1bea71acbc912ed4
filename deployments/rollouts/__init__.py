"""Captured rollouts: what agents have sampled, until a trainer has learned from it. Runs in the controller.

`ledger` decides (pure), `sequences` makes a trainer's arrays of turns (pure), `store` keeps both on disk.
Read first: `deployments.rollouts.rollout_ledger`.
"""
