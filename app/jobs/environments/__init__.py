"""Environments of the RL job: what a model is asked and told, over one turn or more, and its reward.

That of `verifiers` has its own process (`program` runs `verifiers_program`), which asks the fleet through
`relay`.

Read first: `app.jobs.environments.environment`.
"""
