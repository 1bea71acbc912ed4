"""Trajectories, batches, losses, the optimizer, and parameters by checkpoint name. Imports torch and
transformers, never Ray or vLLM.

Read first: `learner`, then `losses`; `sources` for what is published.
"""
