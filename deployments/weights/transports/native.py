"""vLLM's own engines, `ipc` and `nccl`, which load inside a pause (`staging: none`)."""

from vllm.distributed.weight_transfer.base import TrainerInitInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from deployments.weights.transports.registry import TrainerFacts


def trainer_init_info(backend: str, facts: TrainerFacts) -> TrainerInitInfo:
    """Without `chunk_bytes`, vLLM's own defaults.

    Raises:
        ValueError: vLLM has no such engine.
    """
    match backend:
        case "ipc":
            return _ipc(facts)
        case "nccl":
            return _nccl(facts)
    raise ValueError(f"backend must be 'ipc' or 'nccl', got {backend!r}")


def _ipc(facts: TrainerFacts) -> IPCTrainerInitInfo:
    if facts.chunk_bytes is None:
        return IPCTrainerInitInfo(rank=facts.rank)
    buffer_bytes = max(facts.chunk_bytes, facts.largest_tensor_bytes)  # it refuses a tensor that is larger
    return IPCTrainerInitInfo(rank=facts.rank, packed=True, packed_buffer_size_bytes=buffer_bytes)


def _nccl(facts: TrainerFacts) -> NCCLTrainerInitInfo:
    sizes = {} if facts.chunk_bytes is None else {"packed_buffer_size_bytes": facts.chunk_bytes}
    return NCCLTrainerInitInfo(
        rank=facts.rank,
        master_address=facts.master_address,
        master_port=facts.master_port,
        world_size=facts.world_size,
        # One buffer: the receiver of vLLM 0.32 does not order its streams when there are more.
        packed_num_buffers=1,
        **sizes,
    )
