"""The replica's half of every transport, in vLLM's workers: receive while generating, check, hold, swap.

Read first: `deployments.weights.staging.transfer_engine`.
"""
