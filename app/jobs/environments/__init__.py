"""Environments of the RL job: what a model is asked and told, over one turn or more, and its reward.

Runs in the job's process. `environment` has the protocols, and what turns conversations into tokens of the
trainer; `transcript` is a conversation as tokens; `calculator` is a small environment with a tool. That of
`verifiers` has its own process (`program` runs `verifiers_program`), and `relay` between it and the fleet.

Not here: how the fleet is asked (`app.jobs.rollouts`), tasks of one turn (`app.jobs.tasks`).

Read first: `app.jobs.environments.environment`.
"""
