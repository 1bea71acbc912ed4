"""Transport `gloo`: hosts without a common GPU fabric.

    publisher ─► rank ─► rank ─► rank       each link a Gloo group of two

A broadcast goes along a chain, in pieces that each rank forwards while the next arrives. The publisher's link
carries each byte once for any number of replicas; Gloo's own tree carries it log2(ranks) times. Ranks of one
host are neighbours in the chain. Chunks of which little has changed since the last round are sent as
differences (`kept_chunks`).
"""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work
from vllm.utils.cpu_resource_utils import get_memory_node_info

from deployments.host.logs import serve_logger
from deployments.host.network import address_towards
from deployments.protocol.errors import TransferFailed
from deployments.weights.transports.broadcast import (
    BUFFERS,
    BroadcastReceiver,
    BroadcastSender,
    BroadcastTrainerInitInfo,
)
from deployments.weights.transports.kept_chunks import KeptChunks
from deployments.weights.transports.registry import TRANSPORTS
from deployments.weights.transports.rendezvous import (
    Check,
    RendezvousInfo,
    RollCall,
    on_store_thread,
    rendezvous,
)

logger = serve_logger()
ABORTED = "the transfer group was aborted"
PIECE_BYTES = 1 << 20  # the last rank lags the first by one per link
_SLICE_S = 0.02  # waits are sliced so that another thread can abort them


@dataclass
class GlooTrainerInitInfo(BroadcastTrainerInitInfo):
    backend: ClassVar[str] = "gloo"

    chunk_bytes: int = TRANSPORTS["gloo"].chunk_bytes


class GlooGroup:
    """A chain of Gloo groups with abortable waits: ProcessGroupGloo's `abort` does nothing."""

    is_async: ClassVar[bool] = False

    def __init__(self, info: RendezvousInfo, rank: int, check: Check) -> None:
        here = json.dumps([address_towards(info.master_address), get_memory_node_info().available_memory])
        store, payloads = rendezvous(info, rank, check, payload=here)
        members = [json.loads(payload) for payload in payloads]
        addresses = [address for address, _ in members]
        self.kept = KeptChunks() if _fits(info, members) else None
        if self.kept is None and rank == 0:
            logger.warning("a host is short of memory to keep a version: every round is sent whole")
        self._roll_call = RollCall(store, rank, info.world_size)
        self._started = 0
        self._publishes = rank == 0
        self._blocks: dict[int, torch.Tensor] = {}
        self._passing: dict[int, Future[None]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gloo")
        try:
            make = partial(_Links.made, store, info, chain(addresses), rank)
            self._links: _Links | None = _made(make, self._roll_call, check)
        except RuntimeError as error:  # torch has no finer class
            raise TransferFailed(str(_failed(error)), self._roll_call.missing(0, check)) from error
        self._roll_call.finished(0)  # stop listening until the first broadcast

    def reserve(self, size_bytes: int) -> None:
        """A worker uses a new block per broadcast: the staging may keep it."""
        if self._publishes and not self._blocks:
            count = BUFFERS if self.kept is None else 1  # what is kept is sent from there
            self._blocks = {number: torch.empty(size_bytes, dtype=torch.uint8) for number in range(count)}

    def buffer(self, index: int, size_bytes: int) -> torch.Tensor:
        if self._publishes:
            return self._blocks[index % len(self._blocks)][:size_bytes]
        if index not in self._blocks:
            self._blocks = {index: torch.empty(size_bytes, dtype=torch.uint8)}
        return self._blocks[index]

    def agree(self, ready: bool, check: Check = lambda: None) -> bool:
        return ready  # all members keep the same

    def start(self, index: int, parts: Iterable[torch.Tensor], check: Check = lambda: None) -> None:
        self._passing[index] = self._thread.submit(self._pass, parts, check)

    def wait(self, index: int, check: Check = lambda: None) -> None:
        self._passing.pop(index).result()

    def _pass(self, parts: Iterable[torch.Tensor], check: Check) -> None:
        try:
            for part in parts:
                self.broadcast(part, check)
        except BaseException:  # queued broadcasts must not pass
            self.abort()
            raise

    def finish(self) -> None:
        if self.kept is None:  # the host is short of memory
            self._blocks = {}

    def broadcast(self, block: torch.Tensor, check: Check = lambda: None) -> None:
        links = self._links
        if links is None:
            raise TransferFailed(ABORTED)
        self._started += 1
        works: list[Work] = []
        try:
            for piece in block.split(PIECE_BYTES):
                if links.before is not None:
                    works.append(links.before.broadcast([piece], _from_rank_0()))
                    self._wait(works[-1], check)
                if links.after is not None:
                    works.append(links.after.broadcast([piece], _from_rank_0()))
            for work in works:
                self._wait(work, check)
        except BaseException as error:  # the groups must outlive their broadcasts
            if not all(work.is_completed() for work in works):
                threading.Thread(
                    target=_wait_abandoned, args=(links, works), name="gloo-abandoned", daemon=True
                ).start()
            if isinstance(error, TransferFailed) and self._links is not None:
                raise TransferFailed(str(error), self._roll_call.missing(self._started, check)) from error
            raise
        self._roll_call.finished(self._started)

    def _wait(self, work: Work, check: Check) -> None:
        while not _wait_slice(work):
            check()
            if self._links is None:
                raise TransferFailed(ABORTED)
            if self._roll_call.is_called():
                raise TransferFailed("the transfer group failed: at another member first")

    def abort(self) -> None:
        self._links = None


def _fits(info: RendezvousInfo, members: Sequence[tuple[str, int]]) -> bool:
    """Whether all hosts have memory to keep chunks, from each member's address and free memory: all members
    decide alike. A round's chunks, and a shadow, take as much again."""
    size_bytes = 3 * sum(chunk.size_bytes for chunk in info.chunks())
    on_host = Counter(address for address, _ in members)
    return all(free_bytes >= on_host[address] * size_bytes for address, free_bytes in members)


@dataclass(frozen=True, slots=True)
class _Links:
    """To the ranks before and after this one, None at the chain's ends."""

    before: ProcessGroupGloo | None
    after: ProcessGroupGloo | None

    @classmethod
    def made(cls, store: Store, info: RendezvousInfo, ranks: Sequence[int], rank: int) -> Self:
        """Wait for both neighbours, the previous one first."""
        place = ranks.index(rank)

        def link(number: int, end: int) -> ProcessGroupGloo:
            return create_process_group(PrefixStore(f"link/{number}", store), info, end, size=2)

        return cls(
            before=link(place, 1) if place > 0 else None,
            after=link(place + 1, 0) if place + 1 < len(ranks) else None,
        )


def _made(make: Callable[[], _Links], roll_call: RollCall, check: Check) -> _Links:
    """On a thread, which is abandoned: torch's call waits for a dead neighbour until its own timeout."""
    links: Future[_Links] = Future()

    def run() -> None:
        try:
            links.set_result(make())
        except Exception as error:  # raised by the thread that waits
            links.set_exception(error)

    on_store_thread("gloo-links", run, lambda: None)
    while not wait([links], _SLICE_S).done:
        check()
        if roll_call.is_called():
            raise RuntimeError("it failed at another member first")
    return links.result()


def chain(addresses: Sequence[str]) -> list[int]:
    """Ranks in chain order, grouped by address, the publisher first."""
    return sorted(range(len(addresses)), key=lambda rank: (addresses.index(addresses[rank]), rank))


def _wait_slice(work: Work) -> bool:
    completed = work.is_completed()
    try:
        work.wait(timedelta(seconds=_SLICE_S))
    except RuntimeError as error:  # a timeout or a failure: torch has one class for both
        if completed:
            raise _failed(error) from error
        return False
    return True


def _failed(error: RuntimeError) -> TransferFailed:
    return TransferFailed(f"the transfer group failed: {str(error).splitlines()[0]}")


def _wait_abandoned(groups: object, works: Sequence[Work]) -> None:
    """Hold groups until Gloo's threads leave the broadcasts, for which their destructors would wait."""
    for work in works:
        with suppress(RuntimeError):
            work.wait()


class GlooWeightTransferEngine(BroadcastReceiver):
    make_group = GlooGroup


class GlooTrainerWeightTransferEngine(BroadcastSender[GlooTrainerInitInfo]):
    init_info_cls = GlooTrainerInitInfo
    make_group = GlooGroup


def create_process_group(store: Store, info: RendezvousInfo, rank: int, size: int) -> ProcessGroupGloo:
    options: Any = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=info.timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(info.master_address))]
    return ProcessGroupGloo(store, rank, size, options)


def _from_rank_0() -> Any:
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options
