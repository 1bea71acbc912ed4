"""How bytes move, one file per transport with both halves: the publisher's and the worker's.

`vllm_ipc` and `vllm_nccl` receive what vLLM's own trainer engines send (`wire: vllm`).

Read first: `registry`, then `weight_sender`, then `shm`, the smallest.
"""
