"""Transport `ipc`: a trainer rank and the workers on the same GPU. CUDA IPC, packed, opened once.

Each trainer rank has two buffers on its GPU and a page of counters in shared memory; together they
are a channel, named by the GPU's UUID. The workers on that GPU open it when they connect and keep
it. A round is one payload; the chunks pass through the buffers without a call for each:

    trainer rank   waits until every worker took chunk i-2, packs chunk i, publishes i
    worker         waits until chunk i is published, loads it, takes chunk i-1 (its copies are done)

Every wait ends when the other side gives up.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deployments.weights.ipc_channel import (
    BUFFERS,
    GIVEN_UP,
    PUBLISHED,
    TAKEN,
    Page,
    create_page,
    gpu_uuid,
    open_buffer,
    open_page,
    share_buffer,
    wait_for,
)
from deployments.weights.meeting import DEFAULT_TIMEOUT_S, BrokenGroup
from deployments.weights.packing import Chunk, layout, pack
from deployments.weights.segments import remove_orphans, remove_segment
from deployments.weights.sending import OnePayloadEngine, Tensors
from deployments.weights.staging import StagedWeightTransferEngine

# Trainer and replica share the GPU in turns: each chunk costs a turn, and larger ones are fewer.
DEFAULT_CHUNK_BYTES = 1 << 30


@dataclass(kw_only=True)
class IpcInitInfo(WeightTransferInitInfo):
    """The channels by GPU UUID, each {"page": name, "buffers": [handle, handle]}."""

    channels: dict[str, dict[str, Any]]
    rank_offset: int
    world_size: int
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    timeout_s: float = DEFAULT_TIMEOUT_S


@dataclass
class IpcUpdateInfo(WeightTransferUpdateInfo):
    """All tensors of the round that is about to start, in the order in which they come."""

    round_id: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


@dataclass
class IpcTrainerInitInfo(TrainerInitInfo):
    """`world_size` counts the publisher (rank 0) and every worker of every replica.

    With several trainer ranks, torch's default process group is exactly those ranks.
    """

    backend: ClassVar[str] = "slipstream_ipc"

    world_size: int
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    timeout_s: float = DEFAULT_TIMEOUT_S


class IpcWeightTransferEngine(StagedWeightTransferEngine[IpcInitInfo, IpcUpdateInfo]):
    init_info_cls = IpcInitInfo
    update_info_cls = IpcUpdateInfo

    _page: Page | None = None
    _place = TAKEN
    _chunk_bytes = DEFAULT_CHUNK_BYTES

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._stop = threading.Event()
        self._buffers: list[torch.Tensor] = []
        super().__init__(*args, **kwargs)

    def connect(self, init_info: IpcInitInfo) -> None:
        uuid = gpu_uuid(self.device)
        channel = init_info.channels.get(uuid)
        if channel is None:
            raise ValueError(
                f"this worker is on GPU {uuid}, and the trainer has ranks on {sorted(init_info.channels)}: "
                "transport 'ipc' needs a trainer rank on the same GPU"
            )
        self._chunk_bytes = init_info.chunk_bytes
        self._buffers = []  # first: what a former connection mapped is given back
        self._buffers = [open_buffer(handle, self.device) for handle in channel["buffers"]]
        self._page = open_page(channel["page"], init_info.timeout_s)
        self._place = TAKEN + init_info.rank_offset + self.worker_index
        self._page[self._place] = 0

    def receive(self, update_info: IpcUpdateInfo) -> Iterator[tuple[Chunk, torch.Tensor]]:
        page = self._page
        if page is None:
            raise ValueError("no channel: call init_weight_transfer_engine before update_weights")
        self._stop.clear()
        chunks = layout(update_info.names, update_info.dtype_names, update_info.shapes, self._chunk_bytes)
        largest = max((chunk.size_bytes for chunk in chunks), default=0)
        if largest > self._buffers[0].numel():
            raise ValueError(f"a chunk of {largest} bytes in buffers of {self._buffers[0].numel()} bytes")
        start = update_info.round_id << 32
        copied: list[torch.cuda.Event] = []
        for index, chunk in enumerate(chunks):
            page.wait(lambda at=start + index + 1: self._published(page, at), "the publisher of the weights")  # type: ignore[misc]
            yield chunk, self._buffers[index % BUFFERS][: chunk.size_bytes]
            copied.append(torch.cuda.Event())
            copied[index].record()
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
        self._page, self._buffers = None, []

    def _published(self, page: Page, count: int) -> bool:
        if self._stop.is_set():
            raise BrokenGroup("the transfer was aborted")
        published = page[PUBLISHED]
        if page[GIVEN_UP] == count >> 32 or published >> 32 > count >> 32:
            raise BrokenGroup("the publisher has given this round up")
        return published >= count


class IpcTrainerWeightTransferEngine(OnePayloadEngine[IpcTrainerInitInfo]):
    """On every trainer rank: packs into its own GPU's channel. Only rank 0 calls the fleet."""

    init_info_cls = IpcTrainerInitInfo

    _round_id = 0
    _page: Page | None = None
    _senders: Page | None = None  # rank 0's: the other ranks learn there that a round is given up

    def send_weights(self) -> None:
        self._round_id += 1
        super().send_weights()

    def payload(self) -> dict[str, Any]:
        return {"round_id": self._round_id, **super().payload()}

    def follow(self, tensors: Tensors) -> None:
        self.send(tensors, None)

    def send(self, tensors: Tensors, receiving: Future[None] | None) -> None:
        page, start = self._page, self._round_id << 32
        assert page is not None
        for index, chunk in enumerate(self.chunks):
            if index >= BUFFERS:
                self._wait_taken(page, start + index + 1 - BUFFERS, receiving)
            pack(chunk, tensors, self._buffers[index % BUFFERS][: chunk.size_bytes])
            torch.cuda.current_stream().synchronize()
            page[PUBLISHED] = start + index + 1
        self._wait_taken(page, start + len(self.chunks), receiving)

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
            if self._senders is not None and self._senders[GIVEN_UP] == self._round_id:
                raise BrokenGroup("rank 0 of the trainer has given this round up")
            return False

        page.wait(taken, f"the workers on GPU {gpu_uuid(self._buffers[0].device)}")

    def meet(self, init_info: IpcTrainerInitInfo) -> None:
        if self.is_sender:
            remove_orphans()
        largest = max(chunk.size_bytes for chunk in self.chunks)
        device = torch.device("cuda", torch.cuda.current_device())
        self._buffers = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        name, self._page = create_page(init_info.world_size, init_info.timeout_s)
        try:
            self._open_to_workers(init_info, name)
        finally:
            remove_segment(name)  # the mappings stay
        self._workers = self._page.workers()
        uuid = gpu_uuid(device)
        alone = [gpu for gpu, workers in _gathered((uuid, len(self._workers))) if not workers]
        if alone:
            raise ValueError(
                f"no replica's worker is on GPU {', '.join(alone)}, where a trainer rank is: transport "
                "'ipc' needs one on the GPU of each trainer rank"
            )

    def _open_to_workers(self, init_info: IpcTrainerInitInfo, page_name: str) -> None:
        channel = {"page": page_name, "buffers": [share_buffer(block) for block in self._buffers]}
        channels = {gpu_uuid(self._buffers[0].device): channel}
        for other in _gathered(channels):
            channels |= other
        names = _gathered(page_name)
        if not self.is_sender:
            self._senders = open_page(names[0], init_info.timeout_s)
        failure = ""
        if self.is_sender:
            info = {
                "channels": channels,
                "rank_offset": 1,
                "world_size": init_info.world_size,
                "chunk_bytes": init_info.chunk_bytes,
                "timeout_s": init_info.timeout_s,
            }
            try:
                self.client.init_weight_transfer_engine(info)
            except Exception as error:  # the other ranks wait below, and are told
                failure = f"{type(error).__name__}: {error}"
        failures = [text for text in _gathered(failure) if text]
        if failures:
            raise BrokenGroup(f"the fleet did not connect: {failures[0]}")


def _gathered(value: Any) -> list[Any]:
    """The value of every trainer rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
