"""The RL job: prompts, rewards, rollouts, a queue that bounds staleness, a record of steps.

It reaches the fleet over HTTP only. Losses, optimizers and models are in `trainers`.

Read first: `app.jobs.grpo`.
"""
