"""Transport `ipc`: a trainer rank and the workers on the same GPU. CUDA IPC, opened once.

Each trainer rank has a channel, named by the GPU's UUID: a page of counters in shared memory, and either
its model's own tensors (`ipc_tensors`) or, where tensors are gathered or cast for the round, two buffers
into which they are packed. The workers on that GPU open it when they connect and keep it. A round is
one payload; the chunks pass without a call for each:

    trainer rank   waits until every worker took chunk i-2, packs chunk i, publishes i
    worker         waits until chunk i is published, loads it, takes chunk i-1 (its copies are done)

The model's own tensors are published all at once, with their digests, and taken all at once. Every
wait ends when the other side gives up. (Workers that copied while the trainer still made its digests were
no faster: both wait for the same memory.)
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deployments.errors import TransferFailed
from deployments.weights.staging.engine import StagedWeightTransferEngine, wait_for
from deployments.weights.transports.ipc_channel import (
    BUFFERS,
    GIVEN_UP,
    PUBLISHED,
    TAKEN,
    Page,
    create_page,
    gathered,
    gpu_uuid,
    open_buffer,
    open_page,
    share_buffer,
)
from deployments.weights.transports.ipc_tensors import OpenedTensors, SharedTensors
from deployments.weights.transports.registry import DEFAULT_TIMEOUT_S, TRANSPORTS, TrainerFacts
from deployments.weights.transports.sender import OnePayloadEngine
from deployments.weights.wire.chunk_layout import Chunk, DescribedTensors, describe
from deployments.weights.wire.received_chunk import ReceivedChunk, packed_chunk
from deployments.weights.wire.shared_memory import remove_orphans, remove_segment

DEFAULT_CHUNK_BYTES = TRANSPORTS["ipc"].chunk_bytes


@dataclass(kw_only=True)
class IpcInitInfo(DescribedTensors, WeightTransferInitInfo):
    """The channels by GPU UUID: "page", and "buffers" (two handles) or what `SharedTensors` describes."""

    channels: dict[str, dict[str, Any]]
    rank_offset: int
    world_size: int
    timeout_s: float = DEFAULT_TIMEOUT_S


@dataclass
class IpcUpdateInfo(WeightTransferUpdateInfo):
    """The round that is about to start."""

    round_id: int


@dataclass
class IpcTrainerInitInfo(TrainerInitInfo):
    """`world_size` counts the publisher (rank 0) and every worker of every replica.

    With several trainer ranks, torch's default process group is exactly those ranks.
    """

    backend: ClassVar[str] = "slipstream_ipc"

    world_size: int
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    timeout_s: float = DEFAULT_TIMEOUT_S


def trainer_init_info(facts: TrainerFacts) -> IpcTrainerInitInfo:
    """The connection of a trainer rank."""
    return IpcTrainerInitInfo(
        rank=facts.rank,
        world_size=facts.world_size,
        chunk_bytes=DEFAULT_CHUNK_BYTES if facts.chunk_bytes is None else facts.chunk_bytes,
        timeout_s=facts.timeout_s,
    )


class IpcWeightTransferEngine(StagedWeightTransferEngine[IpcInitInfo, IpcUpdateInfo]):
    init_info_cls = IpcInitInfo
    update_info_cls = IpcUpdateInfo

    _page: Page | None = None
    _place = TAKEN
    _chunks: tuple[Chunk, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._stop = threading.Event()
        self._buffers: list[torch.Tensor] = []
        self._tensors: OpenedTensors | None = None
        super().__init__(*args, **kwargs)

    def connect(self, init_info: IpcInitInfo) -> None:
        uuid = gpu_uuid(self.device)
        channel = init_info.channels.get(uuid)
        if channel is None:
            raise ValueError(
                f"this worker is on GPU {uuid}, and the trainer has ranks on {sorted(init_info.channels)}: "
                "transport 'ipc' needs a trainer rank on the same GPU"
            )
        self._chunks = init_info.chunks()
        self._close()
        if "buffers" in channel:
            self._buffers = [open_buffer(handle, self.device) for handle in channel["buffers"]]
        else:
            self._tensors = OpenedTensors(channel, self.device)
        self._page = open_page(channel["page"], init_info.timeout_s)
        self._place = TAKEN + init_info.rank_offset + self.worker_index
        self._page[self._place] = 0

    def receive(self, update_info: IpcUpdateInfo) -> Iterator[ReceivedChunk]:
        page = self._page
        if page is None:
            raise ValueError("no channel: call init_weight_transfer_engine before update_weights")
        self._stop.clear()
        start = update_info.round_id << 32
        if self._tensors is None:
            return self._receive_packed(page, self._chunks, start)
        return self._receive_in_place(page, self._chunks, start, self._tensors)

    def _receive_in_place(
        self, page: Page, chunks: Sequence[Chunk], start: int, tensors: OpenedTensors
    ) -> Iterator[ReceivedChunk]:
        self._wait_published(page, start + len(chunks))
        yield from tensors.arrivals(chunks)
        wait_for(torch.cuda.current_stream().record_event())
        page[self._place] = start + len(chunks)

    def _receive_packed(self, page: Page, chunks: Sequence[Chunk], start: int) -> Iterator[ReceivedChunk]:
        largest = max((chunk.size_bytes for chunk in chunks), default=0)
        if largest > self._buffers[0].numel():
            raise ValueError(f"a chunk of {largest} bytes in buffers of {self._buffers[0].numel()} bytes")
        copied: list[torch.cuda.Event] = []
        for index, chunk in enumerate(chunks):
            self._wait_published(page, start + index + 1)
            yield packed_chunk(chunk, self._buffers[index % BUFFERS][: chunk.size_bytes])
            copied.append(torch.cuda.current_stream().record_event())
            if index > 0:  # one behind: this thread queues the next copies while those run
                wait_for(copied[index - 1])
                page[self._place] = start + index
        if copied:
            wait_for(copied[-1])
            page[self._place] = start + len(chunks)

    def abort(self) -> None:
        self._stop.set()

    def shutdown(self) -> None:
        super().shutdown()
        self._page = None
        self._close()

    def _close(self) -> None:
        """Give back what the connection has mapped."""
        if self._stream is not None:
            self._stream.synchronize()  # copies out of it may still run
        self._buffers, self._tensors = [], None

    def _wait_published(self, page: Page, count: int) -> None:
        def published() -> bool:
            if self._stop.is_set():
                raise TransferFailed("the transfer was aborted")
            if page[GIVEN_UP] == count >> 32 or page[PUBLISHED] >> 32 > count >> 32:
                raise TransferFailed("the publisher has given this round up")
            return page[PUBLISHED] >= count

        page.wait(published, "the publisher of the weights")


class IpcTrainerWeightTransferEngine(OnePayloadEngine[IpcTrainerInitInfo]):
    """On every trainer rank, for its own GPU's channel. Only rank 0 calls the fleet."""

    init_info_cls = IpcTrainerInitInfo

    _round_id = 0
    _shared: SharedTensors | None = None
    _page: Page | None = None
    _senders: Page | None = None  # rank 0's: the other ranks learn there that a round is given up

    def send_weights(self) -> None:
        self._round_id += 1
        super().send_weights()

    def fits(self) -> bool:
        self.packer.look()
        return self._still_there()

    def _still_there(self) -> bool:
        return self._in_place() is (None if self._shared is None else self._shared.tensors)

    def _in_place(self) -> list[torch.Tensor] | None:
        """The tensors that workers on this rank's GPU can read where they are."""
        tensors = self.packer.in_place
        return tensors if tensors and tensors[0].device == self._device else None

    def prepare(self) -> None:
        if not self._still_there():
            raise TransferFailed("the model's tensors are not where they were opened: connect again")
        if self._shared is not None:
            self._shared.look()

    def payload(self) -> dict[str, Any]:
        return {"round_id": self._round_id}

    def follow(self) -> None:
        self.send(None)

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

    def give_up(self) -> None:
        if self._page is not None:
            self._page[GIVEN_UP] = self._round_id

    def shutdown(self) -> None:
        self.give_up()

    def _wait_taken(self, page: Page, count: int, receiving: Future[None] | None) -> None:
        def taken() -> bool:
            if all(page[place] >= count for place in self._workers):
                return True
            if receiving is not None and receiving.done():
                receiving.result()
                return True  # those who remain have received all of it
            if self._senders is not None and self._senders[GIVEN_UP] == self._round_id:
                raise TransferFailed("rank 0 of the trainer has given this round up")
            return False

        page.wait(taken, f"the workers on GPU {self._uuid}")

    def meet(self, init_info: IpcTrainerInitInfo) -> None:
        if self.is_sender:
            remove_orphans()
        self._device = device = torch.device("cuda", torch.cuda.current_device())
        self._uuid = gpu_uuid(device)
        tensors = self._in_place()
        if tensors is not None:
            self._shared = SharedTensors(tensors)
            memory = self._shared.describe()
        else:
            largest = max(chunk.size_bytes for chunk in self.packer.chunks)
            self._buffers = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
            memory = {"buffers": [share_buffer(block) for block in self._buffers]}
        name, self._page = create_page(init_info.world_size, init_info.timeout_s)
        try:
            self._open_to_workers(init_info, {"page": name, **memory})
        finally:
            remove_segment(name)  # the mappings stay
        self._workers = self._page.workers()
        alone = [gpu for gpu, workers in gathered((self._uuid, len(self._workers))) if not workers]
        if alone:
            raise ValueError(
                f"no replica's worker is on GPU {', '.join(alone)}, where a trainer rank is: transport "
                "'ipc' needs one on the GPU of each trainer rank"
            )

    def _open_to_workers(self, init_info: IpcTrainerInitInfo, channel: dict[str, Any]) -> None:
        channels = {self._uuid: channel}
        for other in gathered(channels):
            channels |= other
        names = gathered(channel["page"])
        if not self.is_sender:
            self._senders = open_page(names[0], init_info.timeout_s)
        failure: Exception | None = None
        if self.is_sender:
            agreed = {name: getattr(init_info, name) for name in ("world_size", "chunk_bytes", "timeout_s")}
            described = describe(self.packer.metadata)
            info = {"channels": channels, "rank_offset": 1, **agreed, **described}
            try:
                self.client.init_weight_transfer_engine(info)
            except Exception as error:  # the other ranks wait below, and are told
                failure = error
        texts = gathered(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        if texts[0] is not None:
            raise TransferFailed(f"the fleet did not connect: {texts[0]}")
