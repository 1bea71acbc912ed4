import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
import vllm.utils.nccl
from torch.distributed import HashStore, PrefixStore
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

from deployments.protocol.errors import TransferFailed
from deployments.weights.transports import nccl as nccl_module
from deployments.weights.transports.broadcast import Check
from deployments.weights.transports.kept_chunks import header
from deployments.weights.transports.nccl import Create, NcclGroup, by_store, by_unique_id, create_in_time
from deployments.weights.transports.rendezvous import RendezvousInfo, RollCall, rendezvous
from tests.deployments.weights.transports.rendezvous_info import info_for, no_check

PATIENCE_S = 10.0
DEVICE = torch.device("cuda", 0)


class Communicator:
    """Stands for vLLM's: one call to NCCL that returns at `returns`, and a collective that an abort ends."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.available, self.disabled = True, False
        self.destroyed, self.aborted = 0, threading.Event()
        self.all_reduce()

    @classmethod
    def from_unique_id_bytes(cls, *arguments: Any) -> "Communicator":
        return cls(*arguments)

    def all_reduce(self) -> None:
        pass

    def destroy(self) -> None:
        self.destroyed += 1
        self.aborted.set()


class Nccl:
    """Stands for the call into NCCL; what it returns is in `made`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.entered, self.returns = threading.Event(), threading.Event()
        self.made: list[Communicator] = []
        self.error = error

    def create(self, _: type[PyNcclCommunicator]) -> PyNcclCommunicator:
        self.entered.set()
        assert self.returns.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        self.made.append(Communicator())
        return cast(PyNcclCommunicator, self.made[0])


@pytest.fixture
def nccl() -> Iterator[Nccl]:
    made = Nccl()
    yield made
    made.returns.set()
    no_thread_is_left()


def no_thread_is_left() -> None:
    for thread in threading.enumerate():
        if thread.name == "nccl-creation":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def create(
    call: Create, timeout_s: float = 0.3, check: Check = no_check, store: Any = None, rank: int = 1
) -> PyNcclCommunicator:
    roll_call = RollCall(HashStore() if store is None else store, rank, 3)
    return create_in_time(call, info_for(3, timeout_s), rank, roll_call, check)


def test_the_communicator_is_returned_and_kept(nccl: Nccl) -> None:
    nccl.returns.set()
    assert create(nccl.create) is cast(PyNcclCommunicator, nccl.made[0])
    assert nccl.made[0].destroyed == 0


@pytest.mark.slow
def test_a_call_that_hangs_ends_at_the_timeout_and_names_the_members_that_do_not_answer(nccl: Nccl) -> None:
    start = time.monotonic()
    expected = (
        r"^the transfer group failed: rank 1 waited for NCCL to connect all 3 members \(127\.0\.0\.1:\d+\): "
        r"no progress in 0\.3 s; ranks \[0, 2\] do not answer\. Connect again; "
    )
    with pytest.raises(TransferFailed, match=expected) as raised:
        create(nccl.create)
    assert raised.value.missing_ranks == (0, 2) and time.monotonic() - start < PATIENCE_S / 2


def test_a_check_that_raises_ends_the_wait(nccl: Nccl) -> None:
    def check() -> None:
        if nccl.entered.is_set():
            raise TransferFailed("the connection was aborted")

    with pytest.raises(TransferFailed, match=r"^the connection was aborted$"):
        create(nccl.create, 60.0, check)
    nccl.returns.set()
    no_thread_is_left()
    assert [late.destroyed for late in nccl.made] == [1]


@pytest.mark.slow
def test_a_member_at_which_the_call_failed_ends_the_wait_of_the_others(nccl: Nccl) -> None:
    failing, store = Nccl(RuntimeError("NCCL error: remote process exited\nstack")), HashStore()
    failing.returns.set()
    with ThreadPoolExecutor(max_workers=2) as threads:
        waiting = threads.submit(create, nccl.create, 60.0, no_check, store, 0)
        assert nccl.entered.wait(PATIENCE_S)
        first = r"members \(127\.0\.0\.1:\d+\): NCCL error: remote process exited; ranks \[2\] do not answer"
        with pytest.raises(TransferFailed, match=first) as raised:
            create(failing.create, 60.0, no_check, store, 1)
        assert raised.value.missing_ranks == (2,)
        with pytest.raises(TransferFailed, match=r": it failed at another member first; ranks \[2\]"):
            waiting.result(PATIENCE_S)


@pytest.mark.parametrize("error", [ValueError("disabled"), torch.OutOfMemoryError("no memory")])
def test_what_is_no_peers_fault_is_raised_as_it_is(error: Exception) -> None:
    failing = Nccl(error)
    failing.returns.set()
    with pytest.raises(type(error)) as raised:
        create(failing.create, 60.0)
    assert raised.value is error


class Collective(Communicator):
    """Its first collective waits for a peer that has died."""

    made: "list[Collective]"

    def all_reduce(self) -> None:
        type(self).made.append(self)
        assert self.aborted.wait(PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["store", "unique id"])
def test_an_abort_ends_the_first_collective(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Collective.made = []
    monkeypatch.setattr(nccl_module, "PyNcclCommunicator", Collective)
    monkeypatch.setattr(nccl_module, "_own_stream", lambda _: nullcontext())
    group = PrefixStore("group", HashStore())
    call = by_store(group, 3, 1, DEVICE) if way == "store" else by_unique_id(b"id", 3, 1, DEVICE)
    with pytest.raises(TransferFailed, match=r"no progress in 0\.3 s"):
        create(call)
    no_thread_is_left()
    assert [each.destroyed for each in Collective.made] == [1]


@pytest.mark.slow
def test_a_collective_does_not_begin_after_the_wait_has_ended(
    nccl: Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    Collective.made, late = [], []

    class Late(Collective):
        def __init__(self) -> None:
            late.append(self)
            nccl.returns.wait(PATIENCE_S)
            super().__init__()

    monkeypatch.setattr(nccl_module, "PyNcclCommunicator", Late)
    with pytest.raises(TransferFailed, match=r"no progress in 0\.3 s"):
        create(lambda kind: kind())  # type: ignore[call-arg]
    nccl.returns.set()
    no_thread_is_left()
    assert Collective.made == [] and [each.destroyed for each in late] == [1]


def test_a_disabled_communicator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Disabled(Communicator):
        def all_reduce(self) -> None:
            self.disabled = True

    monkeypatch.setattr(nccl_module, "PyNcclCommunicator", Disabled)
    monkeypatch.setattr(nccl_module, "_own_stream", lambda _: nullcontext())
    with pytest.raises(ValueError, match=r"vLLM has disabled its NCCL communicator$"):
        create(by_unique_id(b"id", 3, 1, DEVICE), 60.0)


@pytest.mark.slow
def test_the_environment_is_restored_while_the_call_still_hangs(
    nccl: Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.setattr(vllm.utils.nccl, "_unpinned_env", {"NCCL_CUMEM_ENABLE": None})
    seen: list[str | None] = []

    def call(kind: type[PyNcclCommunicator]) -> PyNcclCommunicator:
        seen.append(os.environ.get("NCCL_CUMEM_ENABLE"))
        return nccl.create(kind)

    with pytest.raises(TransferFailed):
        create(call)
    assert seen == [None] and os.environ["NCCL_CUMEM_ENABLE"] == "0" and not nccl.made


@pytest.mark.slow
def test_a_group_is_not_held_by_a_member_that_dies_after_the_rendezvous(
    nccl: Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PrefixStore("slipstream", HashStore())
    monkeypatch.setattr(nccl_module, "rendezvous_with_nccl", lambda *_: store)
    monkeypatch.setattr(nccl_module, "by_store", lambda *_: nccl.create)
    with pytest.raises(TransferFailed, match=r"no progress in 0\.3 s; ranks \[0, 2\] do not answer"):
        NcclGroup(info_for(3, 0.3), 1, DEVICE, no_check)


class OnHost(NcclGroup):
    """The half of a group that needs no GPU: what its members tell each other over a real store."""

    def meet(self, info: RendezvousInfo, rank: int, device: torch.device, check: Check) -> Any:
        return rendezvous(info, rank, check)[0], Communicator

    def warm_up(self, check: Check) -> None:
        pass


@pytest.fixture
def without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())


def on_host(info: RendezvousInfo, rank: int) -> OnHost:
    return OnHost(info, rank, torch.device("cpu"), no_check)


def test_what_the_publisher_tells_arrives_and_a_member_that_is_not_ready_is_seen(
    without_streams: None,
) -> None:
    info, told = info_for(3, 30.0), [header(0, 0) for _ in range(3)]
    with ThreadPoolExecutor(max_workers=3) as members:
        groups = list(members.map(lambda rank: on_host(info, rank), range(3)))
        for number, ready in enumerate([(True, True, True), (True, False, True)]):
            agreed = members.map(lambda group, ready: group.agree(ready), groups, ready)
            assert list(agreed) == [all(ready)] * 3
            told[0] = header(number + 1, -number)
            list(members.map(lambda group, part: group.start(0, [part]), groups, told))
            assert torch.equal(told[1], told[0]) and torch.equal(told[2], told[0])


def test_an_abort_ends_the_wait_for_what_a_publisher_that_failed_has_not_told(without_streams: None) -> None:
    def fail() -> Iterator[torch.Tensor]:
        raise OSError("out of memory")
        yield

    info = info_for(2, 20.0)
    with ThreadPoolExecutor(max_workers=2) as members:
        publisher, worker = members.map(lambda rank: on_host(info, rank), range(2))
        waiting = members.submit(worker.start, 0, [header(0, 0)])
        with pytest.raises(OSError, match=r"^out of memory$"):
            publisher.start(0, fail())
        worker.abort()
        with pytest.raises(TransferFailed, match=r"^the transfer group was aborted$"):
            waiting.result(PATIENCE_S)


def test_the_wait_for_a_member_that_died_before_the_first_broadcast_can_be_ended(
    without_streams: None, nccl: Nccl
) -> None:
    class Assembling(OnHost):
        def meet(self, info: RendezvousInfo, rank: int, device: torch.device, check: Check) -> Any:
            return rendezvous(info, rank, check)[0], nccl.create

        def warm_up(self, check: Check) -> None:
            self.agree(True, check)

    info, died = info_for(2, 20.0), threading.Event()
    nccl.returns.set()

    def check() -> None:
        if died.is_set():
            raise TransferFailed("the connection was aborted")

    with ThreadPoolExecutor(max_workers=2) as members:
        joining = members.submit(rendezvous, info, 0, no_check)
        waiting = members.submit(Assembling, info, 1, torch.device("cpu"), check)
        joining.result(PATIENCE_S)
        time.sleep(0.1)
        assert not waiting.done()
        died.set()
        with pytest.raises(TransferFailed, match=r"^the connection was aborted$"):
            waiting.result(PATIENCE_S)
    assert nccl.made[0].destroyed == 1


HUNG = """
import sys, time
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
store.set("slipstream/member/0", "")
print("opened", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_publisher_that_hangs_holds_no_worker_beyond_the_timeout(without_streams: None) -> None:
    info = info_for(2, 2.0)
    arguments = [sys.executable, "-c", HUNG, str(info.master_port)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as publisher:
        try:
            assert publisher.stdout is not None
            with ThreadPoolExecutor(max_workers=1) as members:
                assert publisher.stdout.readline() == "opened\n"
                worker = on_host(info, 1)
                publisher.send_signal(signal.SIGSTOP)
                starting = members.submit(worker.start, 0, [header(0, 0)])
                with pytest.raises(TransferFailed, match=r"^the transfer group failed: no progress in 2 s$"):
                    starting.result(PATIENCE_S)
        finally:
            publisher.kill()
