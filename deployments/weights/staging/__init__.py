"""The replica's half of every transport, in vLLM's workers: receive while generating, check, hold, swap.

`device` fills a shadow of the live parameters on the GPU, `cpu_shadow` one beside an engine on a CPU; `host`
holds the tensors in host memory and loads them inside the pause.

Not here: how bytes arrive (`deployments.weights.transports`) and when to commit (`deployments.ledger`).

Read first: `deployments.weights.staging.transfer_engine`.
"""
