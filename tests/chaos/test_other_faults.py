import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.chaos.arena import Arena, Publisher, watched
from tests.chaos.timing import LOST
from tests.fleet.processes import engine_of
from tests.waiting import until

TIMEOUT_S = 60.0
DELAY_S = 2.0


class Trouble(StrEnum):
    REQUEST_LOST = "request-lost"
    ANSWER_LOST = "answer-lost"
    DELAYED = "delayed"
    DOUBLED = "doubled"  # the second one arrives when the first is answered


class Network:
    """A proxy for HTTP/1.1 with one request a connection, as vLLM's client makes them. With probability
    `share` a message has `trouble`.

    Attributes:
        happened: how often, by kind; "fine" for the others.
    """

    def __init__(self, url: str, trouble: Trouble, share: float, seed: int) -> None:
        target = urlsplit(url)
        assert target.hostname is not None and target.port is not None
        self._target = (target.hostname, target.port)
        self._trouble = trouble
        self._share = share
        self._draw = random.Random(seed)
        self.happened: Counter[str] = Counter()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        trouble = self._trouble if self._draw.random() < self._share else None
        self.happened["fine" if trouble is None else trouble.value] += 1
        with connection, suppress(OSError):
            connection.settimeout(TIMEOUT_S)
            request = _message(connection)
            if trouble is Trouble.REQUEST_LOST:
                return
            if trouble is Trouble.DELAYED:
                time.sleep(DELAY_S)
            answer = self._ask(request)
            if trouble is Trouble.DOUBLED:
                self._ask(request)
            if trouble is not Trouble.ANSWER_LOST:
                connection.sendall(answer)

    def _ask(self, request: bytes) -> bytes:
        with socket.create_connection(self._target, timeout=TIMEOUT_S) as fleet:
            fleet.sendall(request)
            return _message(fleet)


@contextmanager
def network(url: str, trouble: Trouble, share: float = 0.3, seed: int = 1) -> Iterator[Network]:
    """A network to `url` while the block runs."""
    made = Network(url, trouble, share, seed)
    try:
        yield made
    finally:
        made.close()


def _message(connection: socket.socket) -> bytes:
    """A whole request or answer: the head, and as many bytes as it announces."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(1 << 16)
        if not part:
            return data
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lines = [line.split(b":", 1) for line in head.lower().split(b"\r\n")[1:]]
    length = next((int(value) for name, value in lines if name == b"content-length"), 0)
    while len(body) < length:
        part = connection.recv(1 << 16)
        if not part:
            break
        body += part
    return head + b"\r\n\r\n" + body


pytestmark = [
    pytest.mark.chaos,
    pytest.mark.serve,
    pytest.mark.fleet("arena"),
    pytest.mark.timeout(600),
    pytest.mark.long,
]


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """No byte of the disk is free while the block runs."""
    filler = disk / "filler"
    try:
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            for size in (1 << 20, 1 << 12):
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))
        yield
    finally:
        filler.unlink()


@contextmanager
def long_labels(publisher: Publisher) -> Iterator[None]:
    """The journal continues in the space that it has reserved: half a MiB, hundreds of ordinary rounds."""
    publisher.digits = 4000  # int() reads up to 4300
    try:
        yield
    finally:
        publisher.digits = 1


def kill_a_replica(arena: Arena) -> None:
    arena.launched.named("replica")[0].kill()
    until(lambda: not arena.whole(), 30, "the loss of a replica")


@pytest.mark.parametrize("killed", [False, True])
def test_on_a_full_disk_publishers_are_refused_and_the_fleet_serves(arena: Arena, killed: bool) -> None:
    if not arena.launched.own_disk:
        pytest.skip("only root can mount a small disk")
    with watched(arena, may_lose=int(killed)), long_labels(arena.publisher):
        told = len(arena.refused)
        with full(arena.launched.state):
            if killed:
                kill_a_replica(arena)
            until(lambda: len(arena.refused) > told + 3, 400, "refused publishers")
            version = arena.committed()
            time.sleep(5.0)
            assert arena.committed() <= version + 1, "what cannot be recorded is not done"
            assert any("space" in text or "disk" in text for text in arena.refused[told:]), arena.refused[
                told:
            ]


def test_a_dead_engine_is_reported_by_its_replica_when_no_round_asks_for_it(arena: Arena) -> None:
    """Its process lives: without its report the fleet would wait for Serve's three health checks."""
    begin = time.time()
    with watched(arena, may_lose=1), arena.quiet():
        engine_of(arena.launched.named("replica")[0]).kill()
        killed = time.time()
        until(lambda: bool(losses(arena, killed)), 30, "the loss of the replica")
        noticed_s = min(losses(arena, killed)) - killed
        until(
            lambda: arena.launched.named("replica")[-1].create_time() > killed, 30, "its successor's process"
        )
        successor = arena.launched.named("replica")[-1]
        started_s = successor.create_time() - killed
        until(arena.whole, 200, "full strength")
        full_s = time.time() - killed
    registered = [e.at for e in arena.recording().events if e.name == "register" and e.at > killed]
    figures = {
        "noticed_s": noticed_s,
        "successor_s": started_s,
        "engine_s": min(registered) - killed - started_s,
        "full_s": full_s,
        "answers": len(arena.recording().since(begin).answers),
    }
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}), flush=True)
    assert noticed_s < 3.0, figures
    assert started_s < 5.0, figures


def losses(arena: Arena, since: float) -> list[float]:
    """When replicas were members no more; one that Serve has stopped leaves in order, engine or not."""
    gone = (*LOST, "left")
    return [e.at for e in arena.recording().events if e.name in gone and e.at >= since]


@pytest.mark.parametrize("trouble", list(Trouble))
def test_an_unreliable_network_of_a_publisher_mixes_nothing(arena: Arena, trouble: Trouble) -> None:
    with watched(arena), arena.quiet(), network(arena.launched.url, trouble) as between:
        reliable, arena.publisher = arena.publisher, Publisher(between.url)
        try:
            for _ in range(8):
                arena.refused += [why for why in [arena.publish(120)] if why is not None]
        finally:
            arena.publisher.close()
            arena.publisher = reliable
        assert between.happened[trouble] > 0, between.happened
