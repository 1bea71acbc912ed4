"""Environments of the RL job: what a model is asked and told, over one turn or more, and its reward.

They run in the job's process; only that of `verifiers` has its own (`program` runs `verifiers_program`), and
asks the fleet through `relay`.

Not here: how the fleet is sampled (`app.jobs.policy`), tasks of one turn (`app.jobs.tasks`).

Read first: `app.jobs.environments.environment`.
"""
