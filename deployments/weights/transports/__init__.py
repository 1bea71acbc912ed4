"""How bytes move, one file per transport with both halves: the publisher's and the worker's.

The sending half runs in a trainer rank or in an external publisher, the receiving half in vLLM's workers.
Both are vLLM weight transfer engines. `registry` has one record per transport and imports nothing heavy.
`vllm_ipc` and `vllm_nccl` receive what vLLM's own trainer engines send (`wire: vllm`).

Not here: what happens to a chunk after it arrived (`deployments.weights.staging`) and its format
(`deployments.weights.wire`).

Read first: `registry`, then `weight_sender` (shared by all sending halves), then `shm`, the smallest.
"""
