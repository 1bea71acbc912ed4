"""A network between a publisher and the fleet that loses, delays and doubles messages.

A proxy for HTTP/1.1 with one request a connection, as vLLM's client makes them.
"""

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from urllib.parse import urlsplit

TIMEOUT_S = 60.0
DELAY_S = 2.0


class Trouble(StrEnum):
    REQUEST_LOST = "request-lost"
    ANSWER_LOST = "answer-lost"
    DELAYED = "delayed"
    DOUBLED = "doubled"  # the second one arrives when the first is answered


class Network:
    """Each message of `trouble`'s kind is in trouble with probability `share`, drawn with a seed.

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
