"""vLLM's own `nccl` trainer engine, received into the staging while the engine decodes (`wire: vllm`).

    not packed    a broadcast for each tensor, at its place in a chunk of ours
    packed        a broadcast for each piece of vLLM's

A broadcast is queued only once the previous chunk is staged: its kernel occupies the device until the trainer
sends. With one queued ahead an H200 produced no token for 120 s beside a stalled trainer.

The trainer cannot learn that a peer is gone: it waits in its broadcast until it is killed. The workers leave
the group, and the next `init_weight_transfer_engine` forms a new one. Wrong content is reported once all of
it has been taken: only then can the trainer learn of it.
"""

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore
from vllm.distributed.device_communicators.pynccl_wrapper import NCCL_UNIQUE_ID_BYTES
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)

from deployments.protocol.errors import TransferFailed
from deployments.weights.transports.broadcast import BroadcastGroup, GroupReceiver
from deployments.weights.transports.nccl import (
    Create,
    NcclGroup,
    by_unique_id,
    nccl_problem,
    raise_problems,
)
from deployments.weights.transports.registry import DEFAULT_TIMEOUT_S, TRANSPORTS
from deployments.weights.transports.rendezvous import Meeting, RendezvousInfo, meet
from deployments.weights.transports.vllm_packing import (
    is_aligned,
    nccl_pieces,
    received_block,
    separate_tensors,
)
from deployments.weights.wire.chunk_layout import Chunk, Names, ReceivedChunk, Shapes, largest, view

UNIQUE_ID = "broadcast_from/0/0"  # key of the first object of rank 0 in vLLM's `StatelessProcessGroup`


class VllmMeeting(Meeting):
    """Joins the group of vLLM's trainer engine (rank 0), which opens vLLM's store and leaves NCCL's unique id
    there. Workers also announce themselves to each other: NCCL would wait forever for a missing one.
    `payloads` are the workers', from rank 1."""

    unique_id = b""
    first_rank = 1

    def open_store(self) -> TCPStore:
        # As vLLM's own workers connect: rank 0 counts those that do.
        return TCPStore(
            self.info.master_address,
            self.info.master_port,
            self.info.world_size,
            is_master=False,
            timeout=timedelta(seconds=self.info.timeout_s),
            wait_for_workers=True,
            use_libuv=False,
        )

    def finish(self, store: TCPStore) -> None:
        self.wait_for(lambda: bool(store.check([UNIQUE_ID])), lambda: [0])
        self.unique_id = read_unique_id(store.get(UNIQUE_ID))


def read_unique_id(data: bytes) -> bytes:
    """NCCL's unique id from vLLM's pickle of it, which may hold nothing else. Raises TransferFailed."""
    try:
        found = _IdOnly(io.BytesIO(data)).load()
    except Exception as error:  # the bytes of a pickle decide which exception it raises
        raise TransferFailed(f"the publisher left no NCCL unique id: {error}") from error
    if not isinstance(found, bytes) or len(found) != NCCL_UNIQUE_ID_BYTES:
        raise TransferFailed(f"the publisher left no NCCL unique id of {NCCL_UNIQUE_ID_BYTES} bytes")
    return found


def _content(of: Any, state: Any) -> Any:
    """Replaces ctypes' own function; `state` is (dictionary, bytes)."""
    return state[1]


class _IdOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_ctypes", "_unpickle"):
            return _content
        if (module, name) == ("vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a unique id")


class VllmNcclGroup(NcclGroup):
    """Opened by vLLM's trainer engine, which takes no part in the workers' agreements."""

    def meet(
        self, info: RendezvousInfo, rank: int, device: torch.device, check: Callable[[], None]
    ) -> tuple[PrefixStore, Create]:
        meeting = VllmMeeting(info, rank, nccl_problem())
        store = meet(meeting, check)
        raise_problems(dict(enumerate(meeting.payloads, start=1)))
        return store, by_unique_id(meeting.unique_id, info.world_size, rank, device)

    def warm_up(self, check: Callable[[], None]) -> None:
        """vLLM's communicator has run its own collective."""

    @property
    def counted(self) -> int:
        return super().counted - 1  # all but the trainer


class StagedNcclEngine(GroupReceiver[NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo]):
    init_info_cls = NCCLWeightTransferInitInfo
    update_info_cls = NCCLWeightTransferUpdateInfo
    timeout_s = DEFAULT_TIMEOUT_S  # limits every wait for a peer; vLLM's trainer states none

    _packed = True
    _buffer_bytes = 0
    _described: tuple[Names, Names, Shapes] = [], [], []

    def join(self, init_info: NCCLWeightTransferInitInfo, check: Callable[[], None]) -> BroadcastGroup:
        address, port = init_info.master_address, init_info.master_port
        if address is None or port is None:
            raise ValueError(
                "nccl_unique_id_b64: expected master_address and master_port; without a store the workers "
                "cannot see whether a peer is missing (weights.staging 'none' takes a unique id)"
            )
        self._packed, self._buffer_bytes = init_info.packed, init_info.packed_buffer_size_bytes
        self._described = [], [], []
        info = RendezvousInfo(
            master_address=address,
            master_port=port,
            rank_offset=init_info.rank_offset,
            world_size=init_info.world_size,
            timeout_s=self.timeout_s,
            names=[],
            dtype_names=[],
            shapes=[],
            chunk_bytes=self._buffer_bytes,
        )
        return self.join_group(info, info.rank_offset + self.worker_index, check)

    def join_group(self, info: RendezvousInfo, rank: int, check: Callable[[], None]) -> BroadcastGroup:
        return VllmNcclGroup(info, rank, self.device, check)

    def receive(self, update_info: NCCLWeightTransferUpdateInfo) -> Iterator[ReceivedChunk]:
        group = self.group
        chunks: tuple[Chunk, ...] = ()
        taken = 0
        try:
            chunks = self._chunks(update_info)
            _reserve(group, largest(chunks))
            for index, chunk in enumerate(chunks):
                self._take(group, index, chunk)
                taken = index + 1
                yield received_block(chunk, group.buffer(index, chunk.size_bytes))
            group.finish()
        except GeneratorExit:  # content refused; the trainer is free once all of it is taken
            self._take_rest(group, taken, chunks)
            raise
        except BaseException:  # peers wait in broadcasts that this worker will not join
            self.abort()
            raise
        finally:
            if not all(map(is_aligned, chunks)):
                self.staging.release()  # may hold copies made to align tensors

    def _chunks(self, update_info: NCCLWeightTransferUpdateInfo) -> tuple[Chunk, ...]:
        if update_info.names:  # vLLM 0.33's trainer describes its tensors again only if they have changed
            self._described = update_info.names, update_info.dtype_names, update_info.shapes
        if self._packed:
            return nccl_pieces(*self._described, self._buffer_bytes)
        return separate_tensors(*self._described, TRANSPORTS["nccl"].chunk_bytes)

    def _take(self, group: BroadcastGroup, index: int, chunk: Chunk) -> None:
        block = group.buffer(index, chunk.size_bytes)
        parts = [block]
        if not self._packed:  # NCCL makes no broadcast of an empty tensor
            parts = [view(entry, block) for entry in chunk.entries if entry.size_bytes]
        group.start(index, parts)
        group.wait(index)

    def _take_rest(self, group: BroadcastGroup, taken: int, chunks: Sequence[Chunk]) -> None:
        try:
            for index in range(taken, len(chunks)):
                self._take(group, index, chunks[index])
            group.finish()
        except Exception:  # a peer or the device failed too; the refusal is reported
            self.abort()


def _reserve(group: BroadcastGroup, size_bytes: int) -> None:
    """Raises ValueError, which does not blame the replica, if the trainer's pieces are too large."""
    try:
        group.reserve(size_bytes)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"no memory on the device for two buffers of {size_bytes} bytes; the trainer may choose smaller "
            "ones (packed_buffer_size_bytes), or lower gpu_memory_utilization"
        ) from error
