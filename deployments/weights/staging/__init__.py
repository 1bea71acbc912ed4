"""The replica's half of every transport, in vLLM's workers: receive while generating, check, hold, swap.

`device` and `cpu_shadow` fill a second copy of the model; `host` holds the tensors and loads them in the
pause. Read first: `deployments.weights.staging.transfer_engine`.
"""
