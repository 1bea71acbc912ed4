"""Transport `ipc`: a trainer rank and the workers on the same GPU. CUDA IPC, packed, opened once.

Each trainer rank has two buffers on its GPU and a page of counters in shared memory; together they
are a channel, named by the GPU's UUID. The workers on that GPU open it when they connect and keep
it. A round is one payload; the chunks pass through the buffers without a call for each:

    trainer rank   waits until every worker took chunk i-2, packs chunk i, publishes i
    worker         waits until chunk i is published, loads it, takes chunk i-1 (its copies are done)

A counter is `round << 32 | chunks`, so what a broken round left behind is never taken for the next
one's. Every wait has a deadline and ends when the other side gives up. Handles travel as JSON; no
pickle is involved.
"""

import base64
import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deployments.weights.gloo import BrokenGroup
from deployments.weights.packing import Chunk, describe, pack, parse, plan_chunks
from deployments.weights.shm import DIRECTORY, PREFIX, create_segment, remove_orphans, remove_segment
from deployments.weights.staging import StagedWeightTransferEngine

DEFAULT_CHUNK_BYTES = 512 << 20
DEFAULT_TIMEOUT_S = 60.0
_BUFFERS = 2
_POLL_S = 0.00005
_WORD_BYTES = 8
_PUBLISHED, _GIVEN_UP, _TAKEN = 0, 1, 2  # places in the page (int64): the last is rank 0's
_ABSENT = -1
_PAGE_NAME = re.compile(rf"{PREFIX}-\d+-[0-9a-f]{{32}}")


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


class Page:
    """The counters of one channel, mapped into both processes."""

    def __init__(self, words: torch.Tensor, timeout_s: float) -> None:
        self._words = words
        self._timeout_s = timeout_s

    def __getitem__(self, place: int) -> int:
        return int(self._words[place])

    def __setitem__(self, place: int, value: int) -> None:
        self._words[place] = value

    def workers(self) -> list[int]:
        """The places of the workers that have opened the channel."""
        return [_TAKEN + i for i, taken in enumerate(self._words[_TAKEN:].tolist()) if taken != _ABSENT]

    def wait(self, reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not reached():
            if time.monotonic() > deadline:
                raise BrokenGroup(f"{what}: nothing came in {self._timeout_s:g} s")
            time.sleep(_POLL_S)


class IpcWeightTransferEngine(StagedWeightTransferEngine[IpcInitInfo, IpcUpdateInfo]):
    init_info_cls = IpcInitInfo
    update_info_cls = IpcUpdateInfo

    _page: Page | None = None
    _place = _TAKEN
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
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._chunk_bytes = init_info.chunk_bytes
        self._buffers = []  # first: what a former connection mapped is given back
        self._buffers = [open_buffer(handle, self.device) for handle in channel["buffers"]]
        self._page = open_page(channel["page"], init_info.timeout_s)
        self._place = _TAKEN + rank
        self._page[self._place] = 0

    def receive(self, update_info: IpcUpdateInfo) -> Iterator[tuple[Chunk, torch.Tensor]]:
        page = self._page
        if page is None:
            raise ValueError("no channel: call init_weight_transfer_engine before update_weights")
        self._stop.clear()
        tensors = parse(update_info.names, update_info.dtype_names, update_info.shapes)
        chunks = plan_chunks(tensors, self._chunk_bytes)
        largest = max((chunk.size_bytes for chunk in chunks), default=0)
        if largest > self._buffers[0].numel():
            raise ValueError(f"a chunk of {largest} bytes in buffers of {self._buffers[0].numel()} bytes")
        start = update_info.round_id << 32
        copied: list[torch.cuda.Event] = []
        for index, chunk in enumerate(chunks):
            page.wait(lambda at=start + index + 1: self._published(page, at), "the publisher of the weights")  # type: ignore[misc]
            yield chunk, self._buffers[index % _BUFFERS][: chunk.size_bytes]
            copied.append(torch.cuda.Event())
            copied[index].record()
            if index > 0:  # one behind: this thread queues the next copies while those run
                _wait_for(copied[index - 1])
                page[self._place] = start + index
        if copied:
            _wait_for(copied[-1])
            page[self._place] = start + len(chunks)

    def abort(self) -> None:
        self._stop.set()

    def shutdown(self) -> None:
        super().shutdown()
        self._page, self._buffers = None, []

    def _published(self, page: Page, count: int) -> bool:
        if self._stop.is_set():
            raise BrokenGroup("the transfer was aborted")
        published = page[_PUBLISHED]
        if page[_GIVEN_UP] == count >> 32 or published >> 32 > count >> 32:
            raise BrokenGroup("the publisher has given this round up")
        return published >= count


class IpcTrainerWeightTransferEngine(TrainerWeightTransferEngine[IpcTrainerInitInfo]):
    """On every trainer rank: packs into its own GPU's channel. Only rank 0 calls the fleet."""

    init_info_cls = IpcTrainerInitInfo

    def __init__(
        self, *, client: VLLMWeightSyncClient, source: WeightSource, init_info: IpcTrainerInitInfo
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._metadata = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
        self._chunks = plan_chunks(self._metadata, init_info.chunk_bytes)
        self._round_id = 0
        largest = max(chunk.size_bytes for chunk in self._chunks)
        device = torch.device("cuda", torch.cuda.current_device())
        self._buffers = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(_BUFFERS)]
        self._page_name, memory = create_segment(_WORD_BYTES * (_TAKEN + init_info.world_size))
        words = memory.view(torch.int64)
        words.fill_(_ABSENT)
        self._page = Page(words, init_info.timeout_s)
        self._page[_PUBLISHED] = 0
        self._workers: list[int] = []

    @classmethod
    def trainer_init(
        cls,
        init_info: IpcTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        if source is None:
            raise ValueError("transport 'ipc' needs a WeightSource, got None")
        if init_info.is_sender:
            remove_orphans()
        engine = cls(client=client, source=source, init_info=init_info)
        try:
            engine._meet(init_info)
        finally:
            remove_segment(engine._page_name)  # the mappings stay
        return engine

    def send_weights(self) -> None:
        assert self.source is not None
        self._round_id += 1
        if not self.is_sender:
            self._send(iter(self.source), None)
            return
        self.client.start_weight_update()
        calls = ThreadPoolExecutor(max_workers=1)
        try:
            payload = {"round_id": self._round_id, **describe(self._metadata)}
            receiving = calls.submit(self.client.update_weights, payload)
            self._send(iter(self.source), receiving)
            receiving.result()
        finally:
            calls.shutdown(wait=False)
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self._page[_GIVEN_UP] = self._round_id

    def _send(self, tensors: Iterator[tuple[str, torch.Tensor]], receiving: Future[None] | None) -> None:
        start, chunks = self._round_id << 32, self._chunks
        try:
            for index, chunk in enumerate(chunks):
                if index >= _BUFFERS:
                    self._wait_taken(start + index + 1 - _BUFFERS, receiving)
                pack(chunk, tensors, self._buffers[index % _BUFFERS][: chunk.size_bytes])
                torch.cuda.current_stream().synchronize()
                self._page[_PUBLISHED] = start + index + 1
            self._wait_taken(start + len(chunks), receiving)
        except BaseException:  # whatever it was, the receivers must not wait for the rest
            self._page[_GIVEN_UP] = self._round_id
            raise

    def _wait_taken(self, count: int, receiving: Future[None] | None) -> None:
        def taken() -> bool:
            if all(self._page[place] >= count for place in self._workers):
                return True
            if receiving is not None and receiving.done():
                receiving.result()
            return False

        self._page.wait(taken, f"the workers on GPU {gpu_uuid(self._buffers[0].device)}")

    def _meet(self, init_info: IpcTrainerInitInfo) -> None:
        uuid = gpu_uuid(self._buffers[0].device)
        channel = {"page": self._page_name, "buffers": [share_buffer(block) for block in self._buffers]}
        channels = {uuid: channel}
        for other in _gathered(channels):
            channels |= other
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
        self._workers = self._page.workers()
        alone = [gpu for gpu, workers in _gathered((uuid, len(self._workers))) if not workers]
        if alone:
            raise ValueError(
                f"no replica's worker is on GPU {', '.join(alone)}, where a trainer rank is: transport "
                "'ipc' needs one on the GPU of each trainer rank"
            )


def gpu_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def share_buffer(block: torch.Tensor) -> list[Any]:
    """What another process needs to open a CUDA buffer, as JSON types."""
    shared = block.untyped_storage()._share_cuda_()
    return [base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in shared]


def open_buffer(handle: Sequence[Any], device: torch.device) -> torch.Tensor:
    """The buffer (uint8) that `share_buffer` of another process describes.

    Raises:
        ValueError: this is not such a handle, or the driver refuses it.
    """
    try:
        _, memory, size, offset, counter, counter_offset, event, sync = handle
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index,  # the sender's numbering need not be ours
            base64.b64decode(memory),
            int(size),
            int(offset),
            base64.b64decode(counter),
            int(counter_offset),
            base64.b64decode(event),
            bool(sync),
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the CUDA IPC handle cannot be opened: {error}") from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def open_page(name: str, timeout_s: float) -> Page:
    """Map a channel's counters.

    Raises:
        ValueError: no such page on this host; names outside our own are refused.
    """
    if not isinstance(name, str) or _PAGE_NAME.fullmatch(name) is None:
        raise ValueError(f"expected the name of a Slipstream segment, got {name!r}")
    try:
        descriptor = os.open(DIRECTORY / name, os.O_RDWR)
    except FileNotFoundError as error:
        raise ValueError(f"page {name!r} does not exist on this host") from error
    try:
        return Page(torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.int64), timeout_s)
    finally:
        os.close(descriptor)


def _wait_for(event: torch.cuda.Event) -> None:
    # Not event.synchronize(): it spins, on a core and in the driver, beside the thread that decodes.
    while not event.query():
        time.sleep(_POLL_S)


def _gathered(value: Any) -> list[Any]:
    """The value of every trainer rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
