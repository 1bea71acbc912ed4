"""The replica's half of every transport: receive while generating, check, hold, swap between two steps.

Runs in vLLM's worker processes, mixed into vLLM's worker by `staging_extension`. `device` fills a shadow of
the live parameters on the GPU, `cpu` one beside an engine on a CPU; `host` holds the tensors in host memory
and loads them inside the pause.

Not here: how bytes arrive (`deployments.weights.transports`) and when to commit (`deployments.ledger`).
The replica's process imports `reports` and `progress_page`, to read what workers report.

Read first: `deployments.weights.staging.transfer_engine`.
"""
