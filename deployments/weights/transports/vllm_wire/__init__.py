"""The receiving half of vLLM's own wire: its `nccl` and `ipc` trainer engines, as they are, into our staging.

Runs in vLLM's workers. The sending half is vLLM's (`vllm.distributed.weight_transfer`), packed or not. It
states no digests, and nobody can end its broadcast when a member has died.

Not here: what happens to a chunk after it arrived (`deployments.weights.staging`), and vLLM's own receivers,
which load inside a pause (`staging: none`).

Read first: `packing` (where a tensor is in what arrives), then `ipc`, then `nccl` with its `meeting`.
"""
