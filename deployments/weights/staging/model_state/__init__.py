"""What an instance of a model holds: its parameters, its buffers, and all that it keeps beside them.

vLLM's modules keep copies, packed forms and numbers that were made from their weights. A swap has to bring
these along, or the model computes with a mixture. They are found by walking from the model, not by a list.

Imports torch and the digests; nothing of vLLM's models or of the other packages of staging.

Read first: `deployments.weights.staging.model_state.observation`.
"""
