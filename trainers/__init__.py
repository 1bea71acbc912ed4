"""How the model learns: trajectories, batches, losses, the optimizer, and its parameters by checkpoint name.

Uses torch and transformers, never Ray or vLLM; `settings`, `trajectory` and `trajectory_arrays` import no
torch. Read first: `learner`, then `losses`; `sources` for what is published.
"""
