"""What a router keeps of a stream to continue it elsewhere; see `deployments.replica.continuation`."""

from deployments.protocol.rollouts import FRAME, MOVED, NOT_CONTINUED
from deployments.protocol.routing import ERROR_EVENTS

MAX_KEPT_BYTES = 1 << 26  # about a million tokens
HEAD_BYTES, frame_at = FRAME.size, FRAME.unpack_from


class CutStream:
    """The frames of one request's stream, from one replica after another."""

    __slots__ = ("_again", "_kept", "_passed", "_rest")

    def __init__(self) -> None:
        self._rest = b""  # the beginning of a frame, which is not passed before its end
        self._kept = bytearray()  # what the replicas said
        self._passed = 0  # frames whose events the client has
        self._again = 0  # frames that come again and are dropped

    @property
    def said(self) -> bytes | None:
        """What the replicas said of it; None: it cannot be continued."""
        said = self._kept.removesuffix(MOVED)
        return None if said.endswith(NOT_CONTINUED) or len(said) > MAX_KEPT_BYTES else bytes(said)

    @property
    def moved(self) -> bool:
        """Whether the replica ended the stream because it is being stopped."""
        return self._kept.endswith(MOVED)

    @property
    def is_short(self) -> bool:
        """Whether the replica has not made all events again that the client has."""
        return self._again > 0

    def events(self, piece: bytes) -> bytes:
        """The events of the frames that a piece of the stream completes, but those that the client has."""
        if self._rest:
            piece = self._rest + piece
        kept, passed = self._kept, b""
        while len(piece) >= HEAD_BYTES:
            begin, end = frame_at(piece)
            if end > len(piece):
                break
            if len(kept) <= MAX_KEPT_BYTES:
                kept += piece[HEAD_BYTES:begin]
            if self._again and begin < end and not piece.startswith(ERROR_EVENTS, begin):
                self._again -= 1
            elif begin < end:
                self._again = 0  # the client has no such error
                self._passed += 1
                passed += piece[begin:end]
            piece = piece[end:]
        self._rest = piece
        return passed

    def continues(self) -> None:
        """The next piece is another replica's, which makes the events from the beginning."""
        self._kept = self._kept.removesuffix(MOVED)
        self._again, self._rest = self._passed, b""
