"""Ray jobs that run against a fleet over HTTP: the whole RL loop.

Runs in a job's driver process (`make rl`), or in any Python process that reaches the fleet. A job has
prompts, rewards, rollouts, a queue that bounds staleness, and a record of its steps.

Not here: losses, optimizers and models (`trainers`, which run in the trainer deployment). A job knows the
fleet through `app.client` alone and imports nothing of `deployments`.

Read first: `app.jobs.grpo`.
"""
