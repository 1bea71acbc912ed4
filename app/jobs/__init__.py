"""The RL job: prompts, rewards, rollouts, a queue that bounds staleness, and a record of its steps.

Runs in a job's driver process (`make rl`), or in any Python process that reaches the fleet over HTTP.

Not here: losses, optimizers and models (`trainers`, which run in the trainer deployment).

Read first: `app.jobs.grpo`.
"""
