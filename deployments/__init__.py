"""How the fleet runs: one package per process, one for the pure state machine, and the weights' data plane.

Each package is the code of one kind of process (`controller`, `replica`, `router`, `trainer`) or of one plane
(`ledger`, `weights`). Several processes share `protocol` (messages), `calls`, `serve`
(Ray Serve's options) and `host` (forks, shared memory, files). `vllm_plugin` is vLLM's entry point.

Not here: settings and routes (`app`), models, losses and optimizers (`trainers`).

Read first: `docs/architecture.md`, then `deployments.protocol`.
"""
