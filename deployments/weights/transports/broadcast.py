"""Both halves of a broadcasting transport (`gloo`, `nccl`), except the group itself.

Rank 0 is the publisher; the ledger assigns each replica's workers a range of ranks. A lost peer breaks the
group for all, and it is never reused.

    publisher   pack chunk i+1   | broadcast chunk i
    worker      load chunk i     | receive chunk i+1

Both sides fill a group's two buffers in turn. On GPUs events order its stream and the caller's.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deployments.protocol.errors import TransferFailed
from deployments.protocol.poll import FilePart
from deployments.weights.staging.transfer_engine import StagedWeightTransferEngine
from deployments.weights.transports.kept_chunks import KeptChunks, apply, header, read_header
from deployments.weights.transports.registry import DEFAULT_TIMEOUT_S
from deployments.weights.transports.rendezvous import Check, RendezvousInfo
from deployments.weights.transports.weight_sender import OnePayloadSender
from deployments.weights.wire.chunk_layout import (
    Chunk,
    ReceivedChunk,
    describe,
    largest,
    packed_chunk,
    write_digests,
)
from deployments.weights.wire.digest import digest_tensor

BUFFERS = 2


@dataclass
class BroadcastInfo(WeightTransferUpdateInfo):
    """Empty: the tensors were described when the group was formed."""


@dataclass
class BroadcastTrainerInitInfo(TrainerInitInfo):
    backend: ClassVar[str] = "broadcast"  # vLLM requires one of every class

    master_address: str
    master_port: int
    world_size: int  # the publisher (rank 0) and every worker of every replica
    chunk_bytes: int
    timeout_s: float = DEFAULT_TIMEOUT_S  # limits the rendezvous and each broadcast


class BroadcastGroup(Protocol):
    """Broadcasts chunks from rank 0, in order. `start` and `wait` raise TransferFailed if a member is gone,
    at the deadline, and after `abort`."""

    is_async: ClassVar[bool]  # the next broadcast may be queued ahead

    @property
    def kept(self) -> KeptChunks | None:
        """The chunks of the last round. None: all are sent whole, or (`nccl`) this is a worker."""

    def reserve(self, size_bytes: int) -> None:
        """Make the buffers at least this large."""

    def buffer(self, index: int, size_bytes: int) -> torch.Tensor:
        """The buffer of broadcast `index` (uint8 [size_bytes])."""

    def agree(self, ready: bool, check: Check = ...) -> bool:
        """Whether all members are ready for a round of differences."""

    def start(self, index: int, parts: Iterable[torch.Tensor], check: Check = ...) -> None:
        """Broadcast parts of buffer `index`, or others, ordered after the current stream. A part in host
        memory has arrived when the next one is taken from `parts`."""

    def wait(self, index: int, check: Check = ...) -> None:
        """Afterwards the current stream may use the buffer."""

    def finish(self) -> None: ...

    def abort(self) -> None:
        """End every wait, from any thread, for good."""


MakeGroup = Callable[
    [RendezvousInfo, int, Check], BroadcastGroup
]  # takes the info, this member's rank, and its check
Init = TypeVar("Init", bound=BroadcastTrainerInitInfo)
WorkerInit = TypeVar("WorkerInit", bound=WeightTransferInitInfo)
Update = TypeVar("Update", bound=WeightTransferUpdateInfo)


class GroupReceiver(StagedWeightTransferEngine[WorkerInit, Update], Generic[WorkerInit, Update]):
    _group: BroadcastGroup | None = None
    _aborted = threading.Event()  # each attempt to connect has its own

    @abstractmethod
    def join(self, init_info: WorkerInit, check: Check) -> BroadcastGroup: ...

    def init_transfer_engine(self, init_info: WorkerInit) -> None:
        self._aborted.set()
        # Here, on the thread that calls `abort`: it cannot miss a queued connection.
        self._aborted = threading.Event()
        super().init_transfer_engine(init_info)

    def connect(self, init_info: WorkerInit) -> None:
        aborted = self._aborted

        def check() -> None:
            if aborted.is_set():
                raise TransferFailed("the connection was aborted")

        self._leave()
        self._group = self.join(init_info, check)

    @property
    def group(self) -> BroadcastGroup:
        if self._group is None:
            raise ValueError("no transfer group: call init_weight_transfer_engine before update_weights")
        return self._group

    def abort(self) -> None:
        self._aborted.set()
        self._leave()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class BroadcastReceiver(GroupReceiver[RendezvousInfo, BroadcastInfo]):
    init_info_cls = RendezvousInfo
    update_info_cls = BroadcastInfo

    make_group: MakeGroup
    _chunks: tuple[Chunk, ...] = ()
    _told = False  # a header comes before each chunk
    _sent: dict[int, torch.Tensor]  # digests of the last round's chunks

    def join(self, init_info: RendezvousInfo, check: Check) -> BroadcastGroup:
        self._chunks, self._told, self._sent = init_info.chunks(), init_info.keeps, {}
        return self.make_group(init_info, init_info.rank_offset + self.worker_index, check)

    def read_part(self, part: FilePart) -> None:
        self._sent = {}  # the staging no longer has the last broadcast round
        super().read_part(part)

    def receive(self, update_info: BroadcastInfo) -> Iterator[ReceivedChunk]:
        group = self.group
        group.reserve(largest(self._chunks))
        finished = False
        try:
            yield from self._in_turn(group) if group.kept is None else as_deltas(group, self._chunks)
            group.finish()
            finished = True
        finally:
            if not finished:  # else peers wait in broadcasts that this worker will not join
                self.abort()

    def _in_turn(self, group: BroadcastGroup) -> Iterator[ReceivedChunk]:
        if self._told and group.agree(self._has_last_round(group)):
            self.staging.reopen()
        differences: dict[int, torch.Tensor] = {}
        # One ahead: the current stream orders it after the loads of chunk i-1, from the same buffer. Not if
        # staging pauses between chunks: no broadcast may run in the pause.
        ahead = 1 if group.is_async and self.share == 1.0 else 0
        chunks, started = self._chunks, 0
        for index, chunk in enumerate(chunks):
            while started < min(index + 1 + ahead, len(chunks)):
                group.start(started, self._parts(group, started, differences))
                started += 1
            group.wait(index)
            block, difference = group.buffer(index, chunk.size_bytes), differences.pop(index, None)
            if difference is not None:
                self.staging.restore(chunk, block)
                write_digests(chunk, self._sent[index], block)
                apply(difference, block)
            received = packed_chunk(chunk, block)
            if self._told and received.sent is not None:
                self._sent[index] = received.sent
            yield received if difference is None else replace(received, arrived_bytes=difference.numel())

    def _parts(
        self, group: BroadcastGroup, index: int, differences: dict[int, torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        chunk = self._chunks[index]
        block = group.buffer(index, chunk.size_bytes)
        if self._told:
            told = header(0, 0)
            yield told
            size_bytes, _ = read_header(told, index, chunk)
            if size_bytes < chunk.size_bytes:
                block = differences[index] = torch.empty(size_bytes, dtype=torch.uint8, device=block.device)
        yield block

    def _has_last_round(self, group: BroadcastGroup) -> bool:
        """By the first chunk: weights are lost while an engine sleeps."""
        if not self._sent or not self.staging.holds(self._chunks):
            return False
        first = self._chunks[0]
        block = group.buffer(0, first.size_bytes)
        self.staging.restore(first, block)
        return torch.equal(digest_tensor(packed_chunk(first, block).read()), self._sent[0])


def as_deltas(group: BroadcastGroup, chunks: Sequence[Chunk]) -> Iterator[ReceivedChunk]:
    assert group.kept is not None
    kept = group.kept

    def receive(index: int, chunk: Chunk) -> tuple[torch.Tensor, int]:
        def broadcast(parts: Sequence[torch.Tensor]) -> None:
            group.start(index, parts)
            group.wait(index)

        try:
            return kept.receive(index, chunk, broadcast)
        except BaseException:  # what is still to come of this chunk is not the next one
            group.abort()
            raise

    # The next chunks arrive while one is checked and loaded; all are kept, so this needs no more memory.
    ahead = ThreadPoolExecutor(max_workers=1)
    try:
        arriving = ahead.map(receive, range(len(chunks)), chunks)
        for chunk, (block, arrived) in zip(chunks, arriving, strict=True):
            yield replace(packed_chunk(chunk, block), arrived_bytes=arrived)
    finally:
        ahead.shutdown(wait=False, cancel_futures=True)


class BroadcastSender(OnePayloadSender[Init], Generic[Init]):
    make_group: MakeGroup
    _group: BroadcastGroup | None = None

    def connect(self, init_info: Init) -> None:
        if not self.is_sender:
            return
        info = RendezvousInfo(
            master_address=init_info.master_address,
            master_port=init_info.master_port,
            rank_offset=1,
            world_size=init_info.world_size,
            chunk_bytes=init_info.chunk_bytes,
            timeout_s=init_info.timeout_s,
            keeps=self.keeps(init_info),
            **describe(self.packer.metadata),
        )
        calls = ThreadPoolExecutor(max_workers=1)
        try:
            connecting = calls.submit(self.client.init_weight_transfer_engine, asdict(info))
            try:
                self._group = self.make_group(info, 0, lambda: raise_if_failed(connecting))
            except TransferFailed:
                connecting.result()  # the fleet's error names the members that did not join
                raise
            connecting.result()
        finally:
            calls.shutdown(wait=False)

    def keeps(self, init_info: Init) -> bool:
        """Whether chunks come as differences from those of the last round, which workers have staged."""
        return False

    def is_current(self) -> bool:
        return self._group is not None or not self.is_sender

    def send(self, receiving: Future[None] | None) -> None:
        try:
            self._broadcast(lambda: raise_if_failed(receiving))
        except TransferFailed:
            # The other members stop waiting. The call then returns: it names the lost replica, or all others
            # have received everything.
            self.shutdown()

    def _broadcast(self, check: Check) -> None:
        """`check` raises once no replica receives any more."""
        group, chunks = self._group, self.packer.chunks
        if group is None:
            raise TransferFailed("the transfer group is gone: connect again")
        group.reserve(largest(chunks))
        kept = group.kept
        whole = kept is None or not group.agree(len(kept) == len(chunks), check)
        for index, chunk in enumerate(chunks):
            if index >= BUFFERS:
                group.wait(index - BUFFERS, check)
            # On the caller's stream: the tensors' memory may be freed right afterwards.
            block = group.buffer(index, chunk.size_bytes)
            self.packer.pack(index, block)
            if kept is None:
                group.start(index, [block], check)
            else:
                kept.send(index, chunk, block, partial(group.start, index, check=check), whole=whole)
        for index in range(max(len(chunks) - BUFFERS, 0), len(chunks)):
            group.wait(index, check)
        group.finish()

    def abandon_round(self) -> None:
        self.shutdown()  # no receiver will join queued broadcasts

    def shutdown(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def raise_if_failed(call: Future[None] | None) -> None:
    if call is not None and call.done():
        call.result()
