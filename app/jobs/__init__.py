"""The RL job: prompts, rewards, rollouts, a queue that bounds staleness, and a record of its steps.

Runs in any Python process that reaches the fleet over HTTP. Losses, optimizers and models are in `trainers`.

Read first: `app.jobs.grpo`.
"""
