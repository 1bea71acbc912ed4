"""Forming a group, and finding out who is missing after a failure. The store and the groups are torch's."""

import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore
from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
from vllm.distributed.utils import StatelessProcessGroup

from deployments.protocol.errors import TransferFailed
from deployments.weights.transports import rendezvous as rendezvous_module
from deployments.weights.transports.gloo import GlooGroup
from deployments.weights.transports.rendezvous import HOST_S, RendezvousInfo, RollCall, meet, rendezvous
from deployments.weights.transports.vllm_nccl import VllmMeeting, read_unique_id
from tests.deployments.weights.transports.rendezvous_info import info_for, no_check


def test_every_member_receives_the_payload_of_every_other() -> None:
    info = info_for(3, timeout_s=30.0)
    with ThreadPoolExecutor(max_workers=3) as calls:
        joined = list(calls.map(lambda rank: rendezvous(info, rank, no_check, f"rank {rank}"), range(3)))
    assert [payloads for _, payloads in joined] == [["rank 0", "rank 1", "rank 2"]] * 3
    joined[2][0].set("key", "value")
    assert joined[1][0].get("key") == b"value"


CALLS_AT_EXIT = """
import time
from datetime import timedelta
from torch.distributed import TCPStore
from deployments.weights.transports.rendezvous import RollCall

class Slow(TCPStore):
    def check(self, keys):
        ends = time.monotonic() + 1.0
        while time.monotonic() < ends:
            super().check(keys)
        return False

store = Slow("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
roll_call = RollCall(store, 0, 1)
roll_call.is_called()
time.sleep(0.1)
"""


def test_a_process_may_exit_while_a_thread_calls_the_store() -> None:
    """Without a wait for that thread: 'terminate called without an active exception'."""
    done = subprocess.run([sys.executable, "-c", CALLS_AT_EXIT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("address", "family"), [("127.0.0.1", "tcp"), ("::1", "tcp6")])
def test_store_listens_on_the_family_of_its_address_alone(address: str, family: str) -> None:
    info = replace(info_for(1, timeout_s=30.0), master_address=address)
    store, _ = rendezvous(info, 0, no_check)
    listens = re.compile(f":{info.master_port:04X} 0+:0000 0A ")
    found = [each for each in ("tcp", "tcp6") if listens.search(Path(f"/proc/net/{each}").read_text())]
    assert found == [family]
    del store


def test_occupied_port_is_reported() -> None:
    with socket.create_server(("", 0)) as taken:
        info = replace(info_for(1, timeout_s=30.0), master_port=taken.getsockname()[1])
        with pytest.raises(TransferFailed, match="Address already in use"):
            rendezvous(info, 0, no_check)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("joining", "problem", "missing"),
    [
        ([0], r"ranks \[1, 2\] did not join", (1, 2)),
        ([1], "rank 0 has not opened the rendezvous", (0,)),
        ([0, 2], r"ranks \[1\] did not join", (1,)),
    ],
)
def test_members_that_do_not_join_are_named_at_the_timeout(
    joining: list[int], problem: str, missing: tuple[int, ...]
) -> None:
    info = info_for(3, timeout_s=0.5)
    expected = rf"^3 members were expected at 127\.0\.0\.1:{info.master_port} within 0\.5 s: {problem}$"
    with ThreadPoolExecutor(max_workers=2) as pool:
        for future in [pool.submit(rendezvous, info, rank, no_check) for rank in joining]:
            with pytest.raises(TransferFailed, match=expected) as error:
                future.result(20.0)
            assert error.value.missing_ranks == missing


@pytest.mark.parametrize("rank", [0, 1])
def test_a_check_that_raises_ends_the_wait(rank: int) -> None:
    waits, over = threading.Event(), threading.Event()

    def check() -> None:
        waits.set()
        if over.is_set():
            raise TransferFailed("the connection was aborted")

    with ThreadPoolExecutor(max_workers=1) as calls:
        future = calls.submit(rendezvous, info_for(3, timeout_s=30.0), rank, check)
        assert waits.wait(10.0) and not future.done()
        over.set()
        with pytest.raises(TransferFailed, match=r"^the connection was aborted$"):
            future.result(10.0)


@pytest.fixture
def hung_host() -> Iterator[RendezvousInfo]:
    """Connections to it succeed, and nothing is answered."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield replace(info_for(2, timeout_s=0.5), master_port=silent.getsockname()[1])
    for thread in threading.enumerate():
        if thread.name == "rendezvous":  # Python must not end while it opens torch's store
            thread.join(20.0)
            assert not thread.is_alive()


@pytest.mark.slow
def test_wait_for_a_hung_host_ends_at_the_timeout(hung_host: RendezvousInfo) -> None:
    start = time.monotonic()
    with pytest.raises(TransferFailed, match=r"within 0\.5 s: the rendezvous does not answer$"):
        rendezvous(hung_host, 1, no_check)
    assert time.monotonic() - start < 10.0


@pytest.mark.slow
def test_members_that_do_not_answer_are_missing() -> None:
    info = info_for(4, timeout_s=30.0)
    with ThreadPoolExecutor(max_workers=4) as pool:
        stores = [store for store, _ in pool.map(lambda rank: rendezvous(info, rank, no_check), range(4))]
        calls = [RollCall(store, rank, 4) for rank, store in enumerate(stores)]
        assert not calls[1].is_called()
        first = pool.submit(calls[1].missing, 1)
        while not calls[0].is_called():
            time.sleep(0.01)
        others = [pool.submit(calls[rank].missing, 1) for rank in (0, 3)]
        assert [future.result(20.0) for future in (first, *others)] == [(2,)] * 3


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a busy machine does not reach."""
    monkeypatch.setattr(rendezvous_module, "ROLL_CALL_S", 30.0)
    monkeypatch.setattr(rendezvous_module, "HOST_S", 30.0)


def test_no_member_is_missing_if_all_answer(patient: None) -> None:
    info = info_for(2, timeout_s=30.0)
    with ThreadPoolExecutor(max_workers=2) as pool:
        stores = [store for store, _ in pool.map(lambda rank: rendezvous(info, rank, no_check), range(2))]
        start = time.monotonic()
        assert list(pool.map(lambda rank: RollCall(stores[rank], rank, 2).missing(1), range(2))) == [(), ()]
        assert time.monotonic() - start < 15.0


class Unreachable:
    def set(self, key: str, value: str, /) -> None:
        raise RuntimeError("connection reset by peer")

    def get(self, key: str, /) -> bytes:
        raise RuntimeError("connection reset by peer")

    def check(self, keys: list[str], /) -> bool:
        raise RuntimeError("connection reset by peer")


def test_member_without_a_store_names_no_rank() -> None:
    call = RollCall(Unreachable(), 1, 3)
    assert not call.is_called() and call.missing(1) == ()


class Silent(Unreachable):
    """Its host hangs."""

    def set(self, key: str, value: str, /) -> None:
        threading.Event().wait(30.0)


@pytest.mark.slow
def test_wait_for_a_hung_store_ends() -> None:
    call = RollCall(Silent(), 1, 3)
    start = time.monotonic()
    call.finished(4)
    assert not call.is_called()
    assert call.missing(5) == ()
    assert time.monotonic() - start < 15.0


def test_a_check_that_raises_ends_the_roll_call(patient: None) -> None:
    def check() -> None:
        raise OSError("the fleet has aborted the round")

    start = time.monotonic()
    with pytest.raises(OSError, match=r"^the fleet has aborted the round$"):
        RollCall(Silent(), 1, 3).missing(1, check)
    assert time.monotonic() - start < 15.0


@pytest.mark.slow
def test_member_that_has_finished_the_broadcast_is_not_missing() -> None:
    info = info_for(3, timeout_s=30.0)
    with ThreadPoolExecutor(max_workers=3) as pool:
        stores = [store for store, _ in pool.map(lambda rank: rendezvous(info, rank, no_check), range(3))]
        calls = [RollCall(store, rank, 3) for rank, store in enumerate(stores)]
        calls[0].finished(7)
        calls[1].finished(6)
        assert calls[2].missing(7) == (1,)


@pytest.mark.slow
def test_gloo_names_the_member_that_takes_part_in_no_broadcast() -> None:
    info, silent = info_for(4, timeout_s=3.0), 2
    with ThreadPoolExecutor(max_workers=4) as pool:
        groups = list(pool.map(lambda rank: GlooGroup(info, rank, no_check), range(4)))
        block = torch.zeros(4 << 20, dtype=torch.uint8)  # larger than the kernel's socket buffers
        others = [rank for rank in range(4) if rank != silent]
        futures = [pool.submit(groups[rank].broadcast, block.clone()) for rank in others]
        errors = [future.exception(3.0 + 2 * HOST_S) for future in futures]
    failed = [error for error in errors if error is not None]
    assert failed and all(isinstance(error, TransferFailed) for error in failed)
    assert {error.missing_ranks for error in failed} == {(silent,)}  # type: ignore[attr-defined]


# -- the store that vLLM's trainer opens: all workers join it, or none ------------------------------


TIMEOUT_S = 3.0


def trainer(info: Any, says: Any = None) -> StatelessProcessGroup:
    """vLLM's own rank 0: opens the store, waits for as many as the group has members, leaves an object."""
    group = StatelessProcessGroup.create(info.master_address, info.master_port, 0, info.world_size)
    group.broadcast_obj(ncclUniqueId() if says is None else says, src=0)
    return group


def test_workers_receive_the_id_and_each_others_payload() -> None:
    info = info_for(3, TIMEOUT_S)
    meetings = [VllmMeeting(info, rank, f"from {rank}") for rank in (1, 2)]
    with ThreadPoolExecutor(max_workers=3) as calls:
        theirs: Future[StatelessProcessGroup] = calls.submit(trainer, info)
        joined = list(calls.map(lambda meeting: meet(meeting, no_check), meetings))
        group = theirs.result(TIMEOUT_S)
    for meeting in meetings:
        assert meeting.payloads == ["from 1", "from 2"] and meeting.unique_id == bytes(128)
    joined[0].set("key", "value")
    assert PrefixStore("slipstream", group.store).get("key") == b"value", "beside vLLM's own keys"


@pytest.mark.slow
def test_absent_worker_is_named_by_the_others() -> None:
    info = info_for(4, TIMEOUT_S)
    threading.Thread(target=_ignoring_timeouts, args=(info,), daemon=True).start()
    meetings = [VllmMeeting(info, rank, "") for rank in (1, 3)]
    with ThreadPoolExecutor(max_workers=2) as calls:
        waiting = [calls.submit(meet, meeting, no_check) for meeting in meetings]
        for each in waiting:
            error = each.exception(4 * TIMEOUT_S)
            assert isinstance(error, TransferFailed) and error.missing_ranks == (2,), error


def _ignoring_timeouts(info: Any) -> None:
    """vLLM's `create` closes the store's socket a second time if this fails: maybe another test's file."""
    timeout = timedelta(seconds=3 * TIMEOUT_S)
    with suppress(RuntimeError):
        TCPStore(
            info.master_address, info.master_port, info.world_size, True, timeout=timeout, use_libuv=False
        )


def test_absent_trainer_is_named_and_the_wait_can_be_aborted() -> None:
    with pytest.raises(TransferFailed, match="rank 0 has not opened the rendezvous") as caught:
        meet(VllmMeeting(info_for(2, 0.3), 1, ""), no_check)
    assert caught.value.missing_ranks == (0,)

    def stop() -> None:
        raise TransferFailed("the connection was aborted")

    with pytest.raises(TransferFailed, match="the connection was aborted"):
        meet(VllmMeeting(info_for(2, 60.0), 1, ""), stop)


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


@pytest.mark.parametrize(
    ("left", "message"),
    [
        (pickle.dumps(_Evil()), r"posix\.system is no part of a unique id"),
        (pickle.dumps("text"), "no NCCL unique id of 128 bytes"),
        (pickle.dumps(bytes(127)), "no NCCL unique id of 128 bytes"),
        (b"no pickle", "the publisher left no NCCL unique id"),
    ],
)
def test_nothing_but_a_unique_id_is_read(left: bytes, message: str) -> None:
    with pytest.raises(TransferFailed, match=message):
        read_unique_id(left)
