"""How the model learns: trajectories, batches, losses, the optimizer, and its parameters by checkpoint name.

Uses torch and transformers, never Ray or vLLM. `settings`, `trajectory` and `trajectory_arrays` import no
torch.

Not here: processes, publishing and the store (`deployments.trainer`), prompts and rewards (`app.jobs`).

Read first: `trainers.learner`, then `trainers.losses`; `trainers.sources` for what is published.
"""
