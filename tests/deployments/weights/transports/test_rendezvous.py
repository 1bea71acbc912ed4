import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.errors import TransferFailed
from deployments.weights.transports.rendezvous import rendezvous
from tests.deployments.weights.transports.rendezvous_info import go_on, info_for


def test_every_member_receives_the_payload_of_every_other() -> None:
    info = info_for(3, timeout_s=30.0)
    with ThreadPoolExecutor(max_workers=3) as calls:
        joined = list(calls.map(lambda rank: rendezvous(info, rank, go_on, f"rank {rank}"), range(3)))
    assert [payloads for _, payloads in joined] == [["rank 0", "rank 1", "rank 2"]] * 3
    joined[2][0].set("key", "value")
    assert joined[1][0].get("key") == b"value"


@pytest.mark.parametrize(("address", "family"), [("127.0.0.1", "tcp"), ("::1", "tcp6")])
def test_the_store_takes_connections_of_the_addresss_family_alone(address: str, family: str) -> None:
    """Of an IPv4 connection to an IPv6 socket, its thread would ask a name server who that is, and wait."""
    info = replace(info_for(1, timeout_s=30.0), master_address=address)
    store, _ = rendezvous(info, 0, go_on)
    listens = re.compile(f":{info.master_port:04X} 0+:0000 0A ")
    found = [each for each in ("tcp", "tcp6") if listens.search(Path(f"/proc/net/{each}").read_text())]
    assert found == [family]
    del store


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("", 0)) as taken:
        info = replace(info_for(1, timeout_s=30.0), master_port=taken.getsockname()[1])
        with pytest.raises(TransferFailed, match="Address already in use"):
            rendezvous(info, 0, go_on)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "problem"), [(0, r"ranks \[1, 2\] did not join"), (1, "rank 0 has not opened the rendezvous")]
)
def test_members_that_do_not_join_are_waited_for_until_the_timeout(rank: int, problem: str) -> None:
    info = info_for(3, timeout_s=0.3)
    expected = rf"^3 members were expected at 127\.0\.0\.1:{info.master_port} within 0\.3 s: {problem}$"
    with pytest.raises(TransferFailed, match=expected):
        rendezvous(info, rank, go_on)


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


def wait_for_abandoned_threads() -> None:
    """Python must not end while torch's store is being opened in a thread."""
    for thread in threading.enumerate():
        if thread.name == "rendezvous":
            thread.join(20.0)
            assert not thread.is_alive()


@pytest.mark.slow
def test_a_host_that_stands_still_is_waited_for_until_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections succeed, and nothing is answered
        info = replace(info_for(2, timeout_s=0.5), master_port=silent.getsockname()[1])
        start = time.monotonic()
        with pytest.raises(TransferFailed, match=r"within 0\.5 s: the rendezvous does not answer$"):
            rendezvous(info, 1, go_on)
        assert time.monotonic() - start < 10.0
    wait_for_abandoned_threads()


@pytest.mark.slow
def test_a_check_that_raises_ends_the_wait_for_a_host_that_stands_still() -> None:
    def check() -> None:
        if time.monotonic() - start > 0.3:
            raise TransferFailed("the connection was aborted")

    with socket.create_server(("127.0.0.1", 0)) as silent:
        info = replace(info_for(2, timeout_s=3.0), master_port=silent.getsockname()[1])
        start = time.monotonic()
        with pytest.raises(TransferFailed, match=r"^the connection was aborted$"):
            rendezvous(info, 1, check)
        assert time.monotonic() - start < 2.0
    wait_for_abandoned_threads()
