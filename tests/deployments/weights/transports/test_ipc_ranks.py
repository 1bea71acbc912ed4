"""Two trainer ranks of transport `ipc`, in threads, with real pages. No GPU: no bytes are sent."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from deployments.protocol.errors import TransferFailed
from deployments.weights.transports import ipc
from deployments.weights.transports.ipc import IpcTrainerInitInfo, IpcTrainerWeightTransferEngine
from deployments.weights.transports.ipc_channel import (
    ABANDONED,
    PUBLISHED,
    TAKEN,
    MemoryHandle,
    PackedBuffers,
    Page,
    open_page,
    parse_channels,
)
from tests.deployments.weights.transports.transport_fleet import ListSource
from tests.waiting import until

TIMEOUT_S = 20.0  # of the waits in the pages
SOON_S = 8.0
WORLD_SIZE = 3  # the publisher and two workers
HANDLE = MemoryHandle(
    memory="bQ==", size_bytes=64, offset_bytes=0, counter="Yw==", counter_offset=0, event="ZQ==", sync=True
)


class Ranks:
    """Stands for the process group of both ranks."""

    def __init__(self) -> None:
        self.current = threading.local()
        self._barrier = threading.Barrier(2, timeout=SOON_S)
        self._values: list[Any] = [None, None]

    def gather(self, value: Any) -> list[Any]:
        self._values[self.current.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


class Workers:
    """Stands for the fleet: rank 0's client, and the worker on each GPU. It answers when the test says so."""

    def __init__(self) -> None:
        self.pages: list[Page] = []
        self.receiving = threading.Event()
        self.answer: Future[None] = Future()
        self.refusal: Exception | None = None  # of the next round
        self.sources = (0, 1)  # the rank that each worker reads from

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        channels = parse_channels(init_info["channels"])
        self.pages = [open_page(channels[f"GPU-{rank}"].page, WORLD_SIZE, TIMEOUT_S) for rank in (0, 1)]
        for worker, rank in enumerate(self.sources):
            self.pages[rank][TAKEN + 1 + worker] = 0

    def start_weight_update(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    def update_weights(self, _: dict[str, Any]) -> None:
        self.receiving.set()
        self.answer.result(TIMEOUT_S)

    def finish_weight_update(self) -> None:
        pass

    def take(self, rank: int) -> None:
        """The worker on this rank's GPU takes everything that is published now."""
        until(lambda: self.pages[rank][PUBLISHED] >> 32 > 0, SOON_S, "a chunk is published", 0.001)
        self.pages[rank][TAKEN + 1 + rank] = self.pages[rank][PUBLISHED]


class Engine(IpcTrainerWeightTransferEngine):
    """The trainer's half, without GPU memory."""

    def _share(self) -> PackedBuffers:
        self._buffers = [torch.empty(1 << 12, dtype=torch.uint8) for _ in range(ipc.BUFFERS)]
        return PackedBuffers(buffers=(HANDLE, HANDLE))


class Pair:
    """Both ranks, connected. `fail` ends rank 1's pass over its source."""

    def __init__(self, ranks: Ranks, timeout_s: float = TIMEOUT_S, sources: tuple[int, int] = (0, 1)) -> None:
        self.fleet, self.fail = Workers(), threading.Event()
        self.fleet.sources = sources
        self._ranks = ranks
        self._threads = ThreadPoolExecutor(max_workers=2)
        connecting = [self._threads.submit(self._connect, rank, timeout_s) for rank in (0, 1)]
        self.engines = [each.result(SOON_S) for each in connecting]

    def _connect(self, rank: int, timeout_s: float) -> Engine:
        self._ranks.current.rank = rank

        def before(_: int) -> None:
            if rank == 1 and self.fail.is_set():
                raise OSError("out of memory")

        info = IpcTrainerInitInfo(rank=rank, world_size=WORLD_SIZE, chunk_bytes=1 << 12, timeout_s=timeout_s)
        source = ListSource([("weight", torch.ones(4))], before=before)
        return Engine.trainer_init(info, client=self.fleet, source=source)  # type: ignore[arg-type]

    def send(self) -> list["Future[None]"]:
        return [self._threads.submit(engine.send_weights) for engine in self.engines]

    def close(self) -> None:
        if not self.fleet.answer.done():
            self.fleet.answer.set_result(None)
        self._threads.shutdown()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    class Stream:
        def synchronize(self) -> None:
            pass

    made = Ranks()
    monkeypatch.setattr(ipc, "gather_from_ranks", made.gather)
    monkeypatch.setattr(ipc, "gpu_uuid", lambda _: f"GPU-{made.current.rank}")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return made


@pytest.fixture
def pair(ranks: Ranks) -> Iterator[Pair]:
    made = Pair(ranks)
    yield made
    made.close()


def test_round_that_ends_without_a_ranks_replica_does_not_fail_that_rank(pair: Pair) -> None:
    first, second = pair.send()
    pair.fleet.take(0)
    assert pair.fleet.receiving.wait(SOON_S) and not second.done()
    pair.fleet.answer.set_result(None)  # the controller has dropped the replica on rank 1's GPU
    first.result(SOON_S)
    second.result(SOON_S)


@pytest.mark.parametrize("waits_for", ["workers", "fleet"])
def test_rank_0_learns_that_another_rank_has_failed(pair: Pair, waits_for: str) -> None:
    if waits_for == "fleet":
        pair.fleet.pages[0][TAKEN + 1] = 1 << 40  # its own worker takes all chunks
    pair.fail.set()
    first, second = pair.send()
    with pytest.raises(OSError, match=r"^out of memory$"):
        second.result(SOON_S)
    with pytest.raises(TransferFailed, match=r"^rank 1 of the trainer has failed in this round$"):
        first.result(SOON_S)
    assert [page[ABANDONED] for page in pair.fleet.pages] == [1, 1]  # no worker waits any more


def test_rank_that_fails_before_it_sends_reports_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def moved() -> None:
        raise TransferFailed("the model's tensors are not where they were opened")

    monkeypatch.setattr(pair.engines[1], "prepare", moved)
    first, second = pair.send()
    with pytest.raises(TransferFailed, match=r"^rank 1 of the trainer has failed in this round$"):
        first.result(SOON_S)
    with pytest.raises(TransferFailed, match=r"^the model's tensors"):
        second.result(SOON_S)


@pytest.mark.parametrize("refused", ["start_weight_update", "update_weights"])
def test_other_ranks_learn_that_a_call_to_the_fleet_has_failed(pair: Pair, refused: str) -> None:
    if refused == "start_weight_update":
        pair.fleet.refusal = RuntimeError("refused")
    first, second = pair.send()
    if refused == "update_weights":
        pair.fleet.answer.set_exception(RuntimeError("refused"))
    with pytest.raises(RuntimeError, match=r"^refused$"):
        first.result(SOON_S)
    with pytest.raises(TransferFailed, match=r"^rank 0 of the trainer has failed in this round$"):
        second.result(SOON_S)


def test_rank_may_close_before_the_round_has_ended(pair: Pair) -> None:
    first, second = pair.send()
    pair.fleet.take(0)
    pair.fleet.take(1)
    second.result(SOON_S)
    pair.engines[1].shutdown()
    time.sleep(0.2)
    assert not first.done()
    pair.fleet.answer.set_result(None)
    first.result(SOON_S)


def test_reports_of_a_round_do_not_count_in_the_next(pair: Pair) -> None:
    for attempt in (1, 2):
        first, second = pair.send()
        pages = pair.fleet.pages
        until(lambda: all(page[PUBLISHED] >> 32 == attempt for page in pages), SOON_S, "a round", 0.001)  # noqa: B023
        pair.fleet.take(0)
        time.sleep(0.1)
        assert not second.done()
        pair.fleet.answer.set_result(None)
        first.result(SOON_S)
        second.result(SOON_S)
        pair.fleet.answer = Future()


def test_wait_for_a_silent_rank_ends_at_the_timeout(ranks: Ranks) -> None:
    pair = Pair(ranks, timeout_s=0.3)
    try:
        first, second = pair.send()
        pair.fleet.take(0)
        with pytest.raises(
            TransferFailed, match=r"^the workers that read from GPU GPU-1: no progress in 0\.3 s$"
        ):
            second.result(SOON_S)
        with pytest.raises(TransferFailed, match=r"^rank 1 of the trainer has failed in this round$"):
            first.result(SOON_S)
    finally:
        pair.close()


def test_rank_without_workers_waits_for_none(ranks: Ranks) -> None:
    pair = Pair(ranks, sources=(0, 0))
    try:
        first, second = pair.send()
        second.result(SOON_S)
        pair.fleet.take(0)
        time.sleep(0.1)
        assert not first.done(), "the other worker has taken nothing"
        pair.fleet.pages[0][TAKEN + 2] = pair.fleet.pages[0][PUBLISHED]
        pair.fleet.answer.set_result(None)
        first.result(SOON_S)
    finally:
        pair.close()


def test_rank_that_cannot_connect_ends_the_connection_of_all(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(rank: int, *_: Any) -> None:
        if rank == 1:
            raise ValueError("segment 'x' does not exist on this host")

    monkeypatch.setattr(ipc, "TrainerRanks", refuse)
    pair = object.__new__(Pair)
    pair.fleet, pair.fail, pair._ranks = Workers(), threading.Event(), ranks
    with ThreadPoolExecutor(max_workers=2) as threads:
        first, second = (threads.submit(pair._connect, rank, TIMEOUT_S) for rank in (0, 1))
        expected = r"^rank 1 of the trainer did not connect: ValueError: segment 'x' does not exist"
        with pytest.raises(TransferFailed, match=expected):
            first.result(SOON_S)
        with pytest.raises(ValueError, match=r"^segment 'x'"):
            second.result(SOON_S)
