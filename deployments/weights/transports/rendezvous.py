"""How a group's ranks (`gloo`, `nccl`) meet, and who is missing after a failure.

    rank 0      opens a TCPStore at the rendezvous address ─┐
    workers     probe the address until it is open ─────────┤
    all ranks   set their payload, wait for all others   ◄──┘

torch's own ways to form a group cannot be aborted; they are called after this, when no member is missing. A
store's calls block as long as its host hangs: threads make them.
"""

import atexit
import ipaddress
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

from deployments.host.network import host_port
from deployments.protocol.errors import TransferFailed
from deployments.weights.wire.chunk_layout import DescribedTensors

ROLL_CALL_S = 1.0
HOST_S = 1.5  # rank 0, which has the store, leaves last
_ANSWER_POLL_S = 0.02
_LISTEN_S = 0.25
_FAILED = "failed"


Check = Callable[[], None]  # raises to end a wait; called every few milliseconds
_THREADS: dict[threading.Thread, Callable[[], object]] = {}  # those that call a store, and what ends them


def on_store_thread(name: str, run: Callable[[], None], end: Callable[[], object]) -> None:
    """Run what calls a store, which blocks as long as the store's host hangs. `end` makes it return."""

    def until_over() -> None:
        try:
            run()
        finally:
            _THREADS.pop(threading.current_thread(), None)

    thread = threading.Thread(target=until_over, name=name, daemon=True)
    _THREADS[thread] = end
    thread.start()


@atexit.register
def _end_threads() -> None:
    """A call of torch's store that returns while the interpreter exits aborts the process."""
    threads, deadline = dict(_THREADS), time.monotonic() + HOST_S
    for end in threads.values():
        end()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


class RollCall:
    """Finds out who is missing.

    When one member hangs, the others fail without knowing which. Each failing member tells the group's store;
    those that still wait see it and do the same. Silent members that have not finished the broadcast are
    missing.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._talk = _Talk(store, rank, world_size)
        self._limit_s = HOST_S if rank == 0 else ROLL_CALL_S
        weakref.finalize(self, self._talk.close)
        on_store_thread("roll-call", self._talk.run, self._talk.close)

    def is_called(self) -> bool:
        """Whether a member has failed. Call it while waiting for the others."""
        if not self._talk.listening:
            self._talk.listening = True
            self._talk.wake.set()
        return self._talk.called

    def finished(self, broadcasts: int) -> None:
        self._talk.listening, self._talk.finished = False, broadcasts
        self._talk.wake.set()

    def missing(self, started: int, check: Check = lambda: None) -> tuple[int, ...]:
        """Report a failure, wait for the others, and return the missing ranks; none without the store.
        `started`: broadcasts so far, including the failed one."""
        deadline = time.monotonic() + self._limit_s
        self._talk.ask(started, deadline)
        while not self._talk.answered.wait(_ANSWER_POLL_S) and time.monotonic() < deadline + self._limit_s:
            check()
        return self._talk.absent if self._talk.answered.is_set() else ()


class _Talk:
    """Only its thread uses the store; it must not keep the `RollCall` alive."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self.called = self.listening = self._closed = False
        self.finished = self._said = 0
        self.wake, self.answered = threading.Event(), threading.Event()
        self.absent: tuple[int, ...] = ()
        self._asked: tuple[int, float] | None = None  # broadcasts, and until when to wait

    def ask(self, started: int, deadline: float) -> None:
        self._asked = started, deadline
        self.wake.set()

    def close(self) -> None:
        self._closed = True
        self.wake.set()

    def run(self) -> None:
        try:
            while not self._closed:
                self._speak()
                self.wake.wait(_LISTEN_S if self.listening else None)
                self.wake.clear()
        except RuntimeError:  # torch has no finer class: the store is gone, so no rank can be named
            self.absent = ()
        self.answered.set()

    def _speak(self) -> None:
        if self._said != self.finished:
            self._said = self.finished
            self._store.set(f"finished/{self._rank}", str(self._said))
        if self.listening and not self.called:
            self.called = self._store.check([_FAILED])
        if self._asked is not None and not self.answered.is_set():
            self._store.set(f"{_FAILED}/{self._rank}", "")
            self._store.set(_FAILED, "")
            self.absent = self._wait(*self._asked)
            self.answered.set()

    def _wait(self, started: int, deadline: float) -> tuple[int, ...]:
        absent = tuple(range(self._world_size))
        while absent and time.monotonic() < deadline and not self._closed:
            absent = tuple(rank for rank in absent if not self._has_answered(rank, started))
            time.sleep(_ANSWER_POLL_S if absent else 0)
        return absent

    def _has_answered(self, rank: int, started: int) -> bool:
        if self._store.check([f"{_FAILED}/{rank}"]):
            return True
        finished = f"finished/{rank}"
        return self._store.check([finished]) and int(self._store.get(finished)) >= started


_POLL_S = 0.01
_PROBE_TIMEOUT_S = 1.0
_BACKLOG = 4096


@dataclass(kw_only=True)
class RendezvousInfo(DescribedTensors, WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int  # the rank of a replica's first worker
    world_size: int
    timeout_s: float
    keeps: bool = False  # the publisher, and sends differences from the last round (`nccl`)


def rendezvous(
    info: RendezvousInfo, rank: int, check: Check, payload: str = ""
) -> tuple[PrefixStore, list[str]]:
    """Wait until all members have joined. Returns their store and payloads, by rank. Raises TransferFailed
    after `timeout_s`, naming the absent ones."""
    meeting = Meeting(info, rank, payload)
    return meet(meeting, check), meeting.payloads


def meet(meeting: "Meeting", check: Check) -> PrefixStore:
    on_store_thread("rendezvous", meeting.run, meeting.abandon)
    try:
        while not meeting.over.wait(_POLL_S):
            check()
            if time.monotonic() > meeting.deadline + HOST_S:
                raise TransferFailed(f"{_expected(meeting.info)}: the rendezvous does not answer", (0,))
    finally:
        meeting.abandon()
    if meeting.failure is not None:
        raise meeting.failure
    assert meeting.store is not None
    return meeting.store


class Meeting:
    first_rank = 0  # the lowest that announces itself

    def __init__(self, info: RendezvousInfo, rank: int, payload: str) -> None:
        self.info, self.rank, self.payload = info, rank, payload
        # Rank 0 has the store, which the others search for missing members.
        self.deadline = time.monotonic() + info.timeout_s + (HOST_S if rank == 0 else 0.0)
        self.over = threading.Event()
        self.abandoned = False
        self.store: PrefixStore | None = None
        self.payloads: list[str] = []
        self.failure: TransferFailed | None = None

    def abandon(self) -> None:
        self.abandoned = True

    def run(self) -> None:
        try:
            self.join()
        except TransferFailed as error:
            self.failure = error
        except (RuntimeError, OSError) as error:  # torch has no finer class
            self.failure = TransferFailed(f"{_expected(self.info)}: {str(error).splitlines()[0]}")
        self.over.set()

    def join(self) -> None:
        if self.rank != 0:
            self.wait_for(lambda: probe(self.info), lambda: [0])
        tcp_store = self.open_store()
        store = PrefixStore("slipstream", tcp_store)
        keys = {peer: f"member/{peer}" for peer in range(self.first_rank, self.info.world_size)}
        store.set(keys[self.rank], self.payload)
        self.wait_for(
            lambda: bool(store.check(list(keys.values()))),
            lambda: [peer for peer, key in keys.items() if not store.check([key])],
        )
        self.payloads = [store.get(key).decode() for key in keys.values()]
        self.finish(tcp_store)
        self.store = store

    def open_store(self) -> TCPStore:
        info = self.info
        return TCPStore(
            info.master_address,
            info.master_port,
            info.world_size,
            is_master=self.rank == 0,
            timeout=timedelta(seconds=info.timeout_s),
            wait_for_workers=False,
            master_listen_fd=_listening(info) if self.rank == 0 else None,
        )

    def finish(self, store: TCPStore) -> None:
        pass

    def wait_for(self, reached: Callable[[], bool], absent: Callable[[], list[int]]) -> None:
        while not reached():
            if self.abandoned or time.monotonic() > self.deadline:
                raise _incomplete(self.info, absent())
            time.sleep(_POLL_S)


def probe(info: RendezvousInfo) -> bool:
    try:
        socket.create_connection((info.master_address, info.master_port), timeout=_PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _listening(info: RendezvousInfo) -> int | None:
    """An IPv4 socket for the store, which looks up each peer's name: 5 s for ::ffff:127.0.0.1. None: the
    store makes its own, for IPv6 and IPv4."""
    try:
        ipaddress.IPv4Address(info.master_address)
    except ValueError:  # IPv6, or a name, which may be of both
        return None
    listening = socket.create_server(("", info.master_port), backlog=_BACKLOG)
    return listening.detach()


def _incomplete(info: RendezvousInfo, absent: list[int]) -> TransferFailed:
    if absent == [0]:
        return TransferFailed(f"{_expected(info)}: rank 0 has not opened the rendezvous", (0,))
    return TransferFailed(f"{_expected(info)}: ranks {absent} did not join", tuple(absent))


def _expected(info: RendezvousInfo) -> str:
    address = host_port(info.master_address, info.master_port)
    return f"{info.world_size} members were expected at {address} within {info.timeout_s:g} s"
