"""What a router keeps to continue a stream elsewhere; see `deployments.replica.continuation`."""

from deployments.protocol.rollouts import END, MOVED, NOT_CONTINUED
from deployments.protocol.routing import ERROR_EVENTS


class CutStream:
    """One request's frames, from one replica after another."""

    __slots__ = ("_again", "_kept", "_rest")

    def __init__(self) -> None:
        self._rest = b""  # beginning of a frame, held back until its end
        self._kept = bytearray()  # lines and END of each frame whose events the client has
        self._again = 0  # repeated frames, which are dropped

    @property
    def said(self) -> bytes | None:
        """What the replicas said; None: it cannot be continued."""
        said = bytes(self._kept).replace(END, b"").removesuffix(MOVED)
        return None if said.endswith(NOT_CONTINUED) else said

    @property
    def moved(self) -> bool:
        """Whether the replica ended the stream in a graceful shutdown."""
        return self._kept.endswith(MOVED + END)

    @property
    def is_short(self) -> bool:
        """Whether the replica has yet to repeat events that the client has."""
        return self._again > 0

    def events(self, piece: bytes) -> bytes:
        """Events, new to the client, of the frame that this piece is or completes."""
        if self._rest:
            piece, self._rest = self._rest + piece, b""
        events, _, said = piece.partition(END)
        if not said or piece[-1] != 0:
            self._rest = piece
            return b""
        if self._again:
            if events and not events.startswith(ERROR_EVENTS):
                self._again -= 1
                self._kept[-1:] = said
                return b""
            self._again = 0  # the client has no such error
        self._kept += said
        return events

    def continues(self) -> None:
        """The next piece is another replica's, which repeats the events."""
        self._kept = self._kept.removesuffix(MOVED + END)
        self._again, self._rest = self._kept.count(END), b""
