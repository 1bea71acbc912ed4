"""What an instance of a model holds, found by walking from it: parameters, buffers, and what vLLM's modules
derive from weights beside them (copies, packed forms, numbers), which a swap has to bring along.

Read first: `deployments.weights.staging.model_state.observation`.
"""
