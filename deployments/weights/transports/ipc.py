"""Transport `ipc`: trainer ranks and workers on the GPUs of one host. CUDA IPC, opened once per connection.

Each trainer rank has a channel (`ipc_channel`), which the workers on its GPU open. A worker on a GPU without
one opens another's, and first copies each chunk to its own GPU. A round is one payload:

    trainer rank   waits until every worker has taken chunk i-2, packs chunk i, publishes i
    worker         waits until chunk i is published, loads it, takes chunk i-1 (its copies are done)

The model's own tensors are published all at once. Waits end when either side aborts or a trainer rank fails.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightTransferUpdateInfo

from deployments.host.shared_memory import remove_orphans, remove_segment
from deployments.protocol.errors import TransferFailed
from deployments.weights.staging.transfer_engine import StagedWeightTransferEngine, wait_for
from deployments.weights.transports.ipc_channel import (
    ABANDONED,
    BUFFERS,
    ENDED,
    FAILED,
    PUBLISHED,
    TAKEN,
    Channel,
    IpcInitInfo,
    LocalChunk,
    OpenedTensors,
    PackedBuffers,
    Page,
    ResidentTensors,
    SharedTensors,
    create_page,
    gpu_uuid,
    open_memory,
    open_page,
    share_memory,
)
from deployments.weights.transports.registry import DEFAULT_TIMEOUT_S, TRANSPORTS
from deployments.weights.transports.weight_sender import OnePayloadSender, gather_from_ranks
from deployments.weights.wire.chunk_layout import Chunk, ReceivedChunk, describe, largest, packed_chunk

_ASK_S = 0.02


class TrainerRanks:
    """The other ranks, during a round. Only rank 0 calls the fleet: each rank writes into its own page, which
    all map, that the round has ended or failed. A killed rank writes nothing, so every wait has a deadline.
    Raises ValueError if a page is not on this host."""

    def __init__(self, rank: int, own: Page, names: Sequence[str]) -> None:
        self._own = own
        # Waits for workers, on the own page, have the deadlines.
        self._others = {
            other: open_page(name, len(own) - TAKEN, timeout_s=0.0)
            for other, name in enumerate(names)
            if other != rank
        }

    def say_failed(self, round_id: int) -> None:
        self._own[FAILED] = round_id

    def have_ended(self, round_id: int) -> bool:
        """Whether the remaining replicas have everything. Raises TransferFailed if another rank failed."""
        if 0 in self._others and self._others[0][ENDED] == round_id:
            return True
        for rank, page in self._others.items():
            if page[FAILED] == round_id:
                raise TransferFailed(f"rank {rank} of the trainer has failed in this round")
        return False

    def finish(self, receiving: Future[None], round_id: int) -> None:
        """Rank 0: wait for its call to the fleet, then tell the other ranks."""
        while not wait([receiving], timeout=_ASK_S).done:
            self.have_ended(round_id)
        receiving.result()
        self._own[ENDED] = round_id


@dataclass
class IpcUpdateInfo(WeightTransferUpdateInfo):
    round_id: int


@dataclass
class IpcTrainerInitInfo(TrainerInitInfo):
    """Several ranks must be torch's default process group."""

    backend: ClassVar[str] = "slipstream_ipc"

    world_size: int
    chunk_bytes: int = TRANSPORTS["ipc"].chunk_bytes
    timeout_s: float = DEFAULT_TIMEOUT_S


class IpcWeightTransferEngine(StagedWeightTransferEngine[IpcInitInfo, IpcUpdateInfo]):
    init_info_cls = IpcInitInfo
    update_info_cls = IpcUpdateInfo

    _counters: Page | None = None
    _slot = TAKEN  # this worker's counter in the page
    _chunks: tuple[Chunk, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._aborted = threading.Event()
        self._buffers: list[torch.Tensor] = []
        self._tensors: OpenedTensors | None = None
        self._local: LocalChunk | None = None
        super().__init__(*args, **kwargs)

    def connect(self, init_info: IpcInitInfo) -> None:
        own, rank = gpu_uuid(self.device), init_info.rank_offset + self.worker_index
        source = init_info.source_of(own, rank)
        self._chunks = init_info.chunks()
        self._close()
        page, memory = init_info.open_page(source), init_info.channels[source].memory
        if isinstance(memory, PackedBuffers):
            self._buffers = [open_memory(handle, self.device) for handle in memory.buffers]
        else:
            self._tensors = OpenedTensors(memory, self.device)
        if source != own:
            self._local = LocalChunk(self._chunks, self.device)
        self._counters, self._slot = page, TAKEN + rank
        page[self._slot] = 0

    def start_weight_update(self) -> None:
        self._aborted.clear()  # not in `receive`: an abort may come before that begins
        super().start_weight_update()

    def receive(self, update_info: IpcUpdateInfo) -> Iterator[ReceivedChunk]:
        page = self._counters
        if page is None:
            raise ValueError("no channel: call init_weight_transfer_engine before update_weights")
        start, chunks = update_info.round_id << 32, self._chunks
        if self._tensors is None:
            yield from self._receive_packed(page, chunks, start)
            return
        self._wait_published(page, start + len(chunks))
        for received in self._tensors.received(chunks):
            yield received if self._local is None else self._local.tensors(received)
        wait_for(torch.cuda.current_stream().record_event())
        page[self._slot] = start + len(chunks)

    def _receive_packed(self, page: Page, chunks: Sequence[Chunk], start: int) -> Iterator[ReceivedChunk]:
        if (size := largest(chunks)) > self._buffers[0].numel():
            raise ValueError(f"a chunk of {size} bytes in buffers of {self._buffers[0].numel()} bytes")
        copied: list[torch.cuda.Event] = []
        for index, chunk in enumerate(chunks):
            self._wait_published(page, start + index + 1)
            block = self._buffers[index % BUFFERS][: chunk.size_bytes]
            yield packed_chunk(chunk, block if self._local is None else self._local.block(block))
            copied.append(torch.cuda.current_stream().record_event())
            if index > 0:  # one behind: the next copies are queued while these run
                wait_for(copied[index - 1])
                page[self._slot] = start + index
        if copied:
            wait_for(copied[-1])
            page[self._slot] = start + len(chunks)

    def abort(self) -> None:
        self._aborted.set()

    def shutdown(self) -> None:
        super().shutdown()
        self._counters = None
        self._close()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()  # copies from memory that is unmapped below may still run
        self._buffers, self._tensors, self._local = [], None, None

    def _wait_published(self, page: Page, count: int) -> None:
        def published() -> bool:
            if self._aborted.is_set():
                raise TransferFailed("the transfer was aborted")
            if page[ABANDONED] == count >> 32 or page[PUBLISHED] >> 32 > count >> 32:
                raise TransferFailed("the publisher has abandoned this round")
            return page[PUBLISHED] >= count

        page.wait(published, "the publisher of the weights")


class IpcTrainerWeightTransferEngine(OnePayloadSender[IpcTrainerInitInfo]):
    init_info_cls = IpcTrainerInitInfo

    _round_id = 0
    _shared: SharedTensors | None = None
    _page: Page | None = None
    _ranks: TrainerRanks

    def send_weights(self) -> None:
        self._round_id += 1
        try:
            super().send_weights()
        except BaseException:  # the other ranks wait for this part
            self.abandon_round()
            raise

    def is_current(self) -> bool:
        self.packer.refresh_resident()
        return self._is_in_place()

    def _is_in_place(self) -> bool:
        return self._readable() is (None if self._shared is None else self._shared.tensors)

    def _readable(self) -> list[torch.Tensor] | None:
        tensors = self.packer.in_place
        return tensors if tensors and tensors[0].device == self._device else None

    def prepare(self) -> None:
        if not self._is_in_place():
            raise TransferFailed("the model's tensors are not where they were opened: connect again")
        if self._shared is not None:
            self._shared.refresh_digests()

    def payload(self) -> dict[str, Any]:
        return asdict(IpcUpdateInfo(round_id=self._round_id))

    def join_gathers(self) -> None:
        self.send(None)  # every rank has a channel, and packing joins the gathers

    def send(self, receiving: Future[None] | None) -> None:
        page, start, chunks = self._page, self._round_id << 32, self.packer.chunks
        assert page is not None
        if self._shared is not None:
            torch.cuda.current_stream().synchronize()
            page[PUBLISHED] = start + len(chunks)
        else:
            for index, chunk in enumerate(chunks):
                if index >= BUFFERS:
                    self._wait_taken(page, start + index + 1 - BUFFERS, receiving)
                self.packer.pack(index, self._buffers[index % BUFFERS][: chunk.size_bytes])
                torch.cuda.current_stream().synchronize()
                page[PUBLISHED] = start + index + 1
        self._wait_taken(page, start + len(chunks), receiving)
        if receiving is not None:
            self._ranks.finish(receiving, self._round_id)

    def abandon_round(self) -> None:
        self.shutdown()
        self._ranks.say_failed(self._round_id)

    def shutdown(self) -> None:
        # Not FAILED: this rank has done its part, and the others may complete the round.
        if self._page is not None:
            self._page[ABANDONED] = self._round_id

    def _wait_taken(self, page: Page, count: int, receiving: Future[None] | None) -> None:
        def taken() -> bool:
            if all(page[slot] >= count for slot in self._workers):
                return True
            if receiving is not None and receiving.done():
                receiving.result()
                return True  # the replicas that remain have received everything
            return self._ranks.have_ended(self._round_id)

        page.wait(taken, f"the workers that read from GPU {self._uuid}")

    def connect(self, init_info: IpcTrainerInitInfo) -> None:
        if self.is_sender:
            remove_orphans()
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._uuid = gpu_uuid(self._device)
        memory = self._share()
        name, self._page = create_page(init_info.world_size, init_info.timeout_s)
        try:
            self._open(init_info, self._page, Channel(page=name, memory=memory))
        finally:
            remove_segment(name)  # the mappings stay valid
        self._workers = self._page.workers()  # none, if other ranks have them all

    def _share(self) -> PackedBuffers | ResidentTensors:
        tensors = self._readable()
        if tensors is not None:
            self._shared = SharedTensors(tensors)
            return self._shared.describe()
        size = largest(self.packer.chunks)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)]
        first, second = map(share_memory, self._buffers)
        return PackedBuffers(buffers=(first, second))

    def _open(self, init_info: IpcTrainerInitInfo, page: Page, channel: Channel) -> None:
        channels = gather_from_ranks((self._uuid, channel))
        failure: Exception | None = None
        try:
            self._ranks = TrainerRanks(init_info.rank, page, [each.page for _, each in channels])
            if self.is_sender:
                info = IpcInitInfo(
                    channels=dict(channels),
                    rank_offset=1,
                    world_size=init_info.world_size,
                    chunk_bytes=init_info.chunk_bytes,
                    timeout_s=init_info.timeout_s,
                    **describe(self.packer.metadata),
                )
                self.client.init_weight_transfer_engine(info.to_wire())
        except Exception as error:  # raised below, once the other ranks have received it
            failure = error
        reasons = gather_from_ranks(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, reason in enumerate(reasons):
            if reason is not None:
                raise TransferFailed(f"rank {rank} of the trainer did not connect: {reason}")
