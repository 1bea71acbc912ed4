"""How the fleet runs: one package per process, one for the pure state machine, and the weights' data plane.

Each package is the code of one kind of process (`controller`, `replica`, `router`, `trainer`) or of one plane
(`ledger`, `weights`). The modules beside them are shared: `protocol` (messages), `errors`, `logs`,
`request_headers`, `placement` (GPU slots) and `vllm_plugin` (vLLM's entry point).

Not here: settings and routes (`app`), models, losses and optimizers (`trainers`).

Read first: `docs/architecture.md`, then `deployments.protocol`.
"""
