"""The trainer's half of every transport.

    prepare                 work before the replicas know of the round
    start_weight_update     every replica begins an update
    update_weights          the call inside which the replicas receive; it runs beside the sending
    transfer                packs and moves the bytes (the transport's own part)
    finish_weight_update    the fleet verifies and commits

After a failure `abandon_round` ends the receivers' waits. The pending call is not joined: it returns only
once the fleet has aborted the round.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Any, Generic, Protocol, Self, TypeVar, runtime_checkable

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from deployments.vllm_versions import specs_of, tensors_of
from deployments.weights.transports.registry import TrainerFacts
from deployments.weights.wire.chunk_layout import pack, plan_chunks, view, write_digests
from deployments.weights.wire.digest import prepare_digests
from deployments.weights.wire.digest_definition import Copy

T = TypeVar("T")
Init = TypeVar("Init", bound=TrainerInitInfo)
Metadata = list[tuple[str, torch.dtype, tuple[int, ...]]]


def gather_from_ranks(value: T) -> list[T]:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    values = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def native_init_info(backend: str, facts: TrainerFacts) -> TrainerInitInfo:
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    sizes: dict[str, Any] = {}
    match backend:
        case "ipc":
            if facts.chunk_bytes is not None:  # vLLM refuses a tensor larger than the buffer
                size = max(facts.chunk_bytes, facts.largest_tensor_bytes)
                sizes = {"packed": True, "packed_buffer_size_bytes": size}
            return IPCTrainerInitInfo(rank=facts.rank, **sizes)
        case "nccl":
            if facts.chunk_bytes is not None:
                sizes = {"packed_buffer_size_bytes": facts.chunk_bytes}
            return NCCLTrainerInitInfo(
                rank=facts.rank,
                master_address=facts.master_address,
                master_port=facts.master_port,
                world_size=facts.world_size,
                # vLLM 0.32's receiver, on some replicas, does not order more.
                packed_num_buffers=1,
                **sizes,
            )
    raise ValueError(f"backend must be 'ipc' or 'nccl', got {backend!r}")


@runtime_checkable
class ResidentSource(Protocol):
    def resident(self) -> list[torch.Tensor] | None: ...


class ChunkPacker:
    """A source's chunks, and their content in each round. For resident tensors, the model's own memory, a
    chunk's work is prepared once: a round is a few launches, without Python per tensor. Others are packed as
    the source yields them. Raises ValueError if they differ from those declared."""

    def __init__(self, source: WeightSource, chunk_bytes: int) -> None:
        self._source = source
        self.metadata: Metadata = [(spec.name, spec.dtype, tuple(spec.shape)) for spec in specs_of(source)]
        self.chunks = plan_chunks(self.metadata, chunk_bytes)
        self.resident: list[torch.Tensor] | None = None  # tensors before the cast
        self.in_place: list[torch.Tensor] | None = None  # the same if no tensor is cast
        self._firsts = list(accumulate((len(chunk.entries) for chunk in self.chunks), initial=0))
        self._pass: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._digests: dict[tuple[int, int], Callable[[], torch.Tensor]] = {}  # keys: chunk, block's address
        self.refresh_resident()

    def refresh_resident(self) -> None:
        resident = self._source.resident() if isinstance(self._source, ResidentSource) else None
        if resident is self.resident:
            return
        is_cast = False
        if resident is not None:
            _check_resident(self.metadata, resident)
            is_cast = any(t.dtype != meta[1] for t, meta in zip(resident, self.metadata, strict=True))
        self.resident, self._digests = resident, {}
        self.in_place = None if is_cast else resident

    def begin(self) -> None:
        self.refresh_resident()
        self._pass = tensors_of(self._source) if self.resident is None else iter(())

    def pack(self, index: int, block: torch.Tensor) -> None:
        """Write the next chunk, with its digests, into a block (uint8 [chunk.size_bytes]). Raises ValueError
        for an undeclared tensor."""
        chunk = self.chunks[index]
        if self.resident is None:
            pack(chunk, self._pass, block)
            return
        digests = self._digests.get((index, block.data_ptr()))
        if digests is None:
            sources = self.resident[self._firsts[index] : self._firsts[index + 1]]
            targets = [view(entry, block) for entry in chunk.entries]
            pairs = list(zip(sources, targets, strict=True))
            copies = [Copy(index=i, source=source, target=target) for i, (source, target) in enumerate(pairs)]
            # Digests are of what is sent: the copy, if the tensor is cast.
            inspected = [source if source.dtype == target.dtype else target for source, target in pairs]
            digests = prepare_digests(inspected, copies)
            if block.is_cuda:  # blocks in host memory are new in every round
                self._digests[index, block.data_ptr()] = digests
        write_digests(chunk, digests(), block)

    def drain(self) -> None:
        for _ in self._pass:
            pass


def _check_resident(metadata: Metadata, resident: list[torch.Tensor]) -> None:
    if len(metadata) != len(resident):
        raise ValueError(f"the source declared {len(metadata)} tensors and has {len(resident)}")
    for (name, dtype, shape), tensor in zip(metadata, resident, strict=True):
        castable = dtype.is_floating_point and tensor.is_floating_point()
        if tuple(tensor.shape) != shape or not (tensor.dtype == dtype or castable):
            actual = (tensor.dtype, tuple(tensor.shape))
            raise ValueError(f"the source declared {(name, dtype, shape)} and has {actual}")


class WeightSender(TrainerWeightTransferEngine[Init], Generic[Init]):
    """On every trainer rank; only rank 0, the sender, calls the fleet."""

    def __init__(
        self, *, client: VLLMWeightSyncClient, source: WeightSource, is_sender: bool, chunk_bytes: int
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.packer = ChunkPacker(source, chunk_bytes)

    @classmethod
    def trainer_init(
        cls, init_info: Init, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """On every trainer rank. Raises ValueError or TransferFailed."""
        if source is None:
            raise ValueError(f"transport {init_info.backend!r} needs a WeightSource, got None")
        engine = cls(
            client=client, source=source, is_sender=init_info.is_sender, chunk_bytes=init_info.chunk_bytes
        )
        try:
            engine.connect(init_info)
        except BaseException:  # peers that have joined must not wait
            engine.shutdown()
            raise
        return engine

    def send_weights(self) -> None:
        """On every trainer rank. Raises TransferFailed (a peer is gone, or tensors have moved: connect again)
        or ValueError (undeclared tensors)."""
        self.packer.begin()
        self.prepare()
        if self.is_sender:
            self.client.start_weight_update()
        calls = ThreadPoolExecutor(max_workers=1)
        try:
            if self.is_sender:
                self.transfer(calls)
            else:
                self.join_gathers()
        except BaseException:  # receivers must not wait for the other chunks
            self.abandon_round()
            raise
        finally:
            calls.shutdown(wait=False)
        if self.is_sender:
            self.client.finish_weight_update()

    @abstractmethod
    def connect(self, init_info: Init) -> None: ...

    def is_current(self) -> bool:
        """Whether the connection can still send from the tensors' memory."""
        return True

    def prepare(self) -> None:
        pass

    @abstractmethod
    def transfer(self, calls: ThreadPoolExecutor) -> None:
        """On the sender: send all chunks, and submit the receiving calls to `calls`."""

    def join_gathers(self) -> None:
        """On the other ranks."""
        self.packer.drain()

    def abandon_round(self) -> None:
        """End the receivers' waits for an unfinished round."""


class OnePayloadSender(WeightSender[Init], Generic[Init]):
    """One payload a round, received inside one call."""

    def transfer(self, calls: ThreadPoolExecutor) -> None:
        receiving = calls.submit(self.client.update_weights, self.payload())
        self.send(receiving)
        receiving.result()

    def payload(self) -> dict[str, Any]:
        return {}

    @abstractmethod
    def send(self, receiving: Future[None] | None) -> None:
        """Send all chunks. Once the call `receiving` has failed, no replica receives."""
