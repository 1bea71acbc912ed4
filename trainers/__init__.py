"""How the model learns: trajectories, batches, losses, the optimizer, and its parameters by checkpoint name.

Runs in the trainer deployment's ranks, and in any process without a fleet: torch and transformers only, never
Ray or vLLM. Settings are in modules without torch, so that reading a configuration imports nothing heavy.

Not here: processes, publishing and the store (`deployments.trainer`), prompts and rewards (`app.jobs`).

Read first: `trainers.learner`, then `trainers.losses`; `trainers.sources` for what is published.
"""
