"""What replicas and the controller say to each other over a replica's own connection.

A poll over Serve's handles costs the controller's process about a millisecond: two calls of an actor, each
with a change of threads. A thousand replicas poll some eight times a round. Over a connection of its own a
poll costs a tenth. Serve's handle says where the controller listens, and with which key.

    frame    length (4 bytes) ─ number of the poll (4 bytes) ─ pickled Report, Directive or Unanswered

The first bytes of a connection are the key. Nothing is unpickled before it has been checked.
"""

import pickle
import struct
from collections.abc import Iterator
from dataclasses import dataclass

KEY_BYTES = 32
MAX_FRAME_BYTES = 1 << 30  # a directive carries what a publisher sends, as a request's body does
_HEAD = struct.Struct("!II")


@dataclass(frozen=True, slots=True, kw_only=True)
class PollAddress:
    """Where the controller listens for polls."""

    host: str
    port: int
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswered:
    """In the place of a directive."""

    reason: str


def frame(number: int, message: object) -> bytes:
    """One message as bytes."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(body), number) + body


class Frames:
    """The messages in the bytes that come."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, object]]:
        """The number and the message of each frame that is complete.

        Raises:
            ValueError: a frame is too long.
        """
        self._bytes += data
        while len(self._bytes) >= _HEAD.size:
            length, number = _HEAD.unpack_from(self._bytes)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes, expected at most {MAX_FRAME_BYTES}")
            end = _HEAD.size + length
            if len(self._bytes) < end:
                return
            with memoryview(self._bytes) as view:
                message = pickle.loads(view[_HEAD.size : end])
            del self._bytes[:end]
            yield number, message
