"""What an instance of a model holds: parameters, buffers, and what vLLM's modules derive from weights.

Read first: `deployments.weights.staging.model_state.observation`.
"""
