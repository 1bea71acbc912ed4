"""What a router keeps of a stream to continue it elsewhere; see `deployments.replica.continuation`."""

from deployments.protocol.rollouts import MOVED, NOT_CONTINUED, SAID
from deployments.protocol.routing import ERROR_EVENTS

MAX_KEPT_BYTES = 1 << 26  # about a million tokens
END = b"\n\n"
COLON = 58  # begins a comment
TOKENS = SAID + b"["  # begins what the engine said, unlike `NOT_CONTINUED` and `MOVED`


class CutStream:
    """A stream of events of one request, from one replica after another.

    Attributes:
        rest: the beginning of an event, which is not passed before its end.
        moved: the replica ended the stream because it is being stopped.
    """

    def __init__(self) -> None:
        self.rest = b""
        self.moved = False
        self._kept: bytearray | None = bytearray()  # comments; None: it cannot be continued
        self._passed = 0  # events that the client has
        self._again = 0  # events that come again and are dropped

    @property
    def said(self) -> bytes | None:
        """What the replicas said of it; None: it cannot be continued."""
        if self._kept is None:
            return None
        return b"".join(comment[len(SAID) :] + b"\n" for comment in self._kept.split(END)[:-1])

    def events(self, piece: bytes) -> bytes:
        """The events that a piece of the stream completes, but comments, and those that the client has."""
        if (kept := self._kept) is not None and not self.rest and not self._again:
            # Nearly every piece is one comment of tokens and one event.
            end = piece.find(END) + 2
            if (
                piece.startswith(TOKENS)
                and piece.find(END, end) == len(piece) - 2
                and piece[end] != COLON
                and len(kept) < MAX_KEPT_BYTES
            ):
                kept += piece[:end]
                self._passed += 1
                return piece[end:]
        passed = []
        *events, self.rest = (self.rest + piece).split(END)
        for event in events:
            if event.startswith(ERROR_EVENTS):
                self._again = 0  # the client has no such event
            if event == SAID + MOVED:
                self.moved = True
            elif event == SAID + NOT_CONTINUED:
                self._kept = None
            elif event.startswith(SAID):
                self._keep(event + END)
            elif self._again:
                self._again -= 1
            else:
                passed.append(event + END)
        self._passed += len(passed)
        return b"".join(passed)

    @property
    def is_short(self) -> bool:
        """Whether the replica has not made all events again that the client has."""
        return self._again > 0

    def continues(self) -> None:
        """The next piece is another replica's, which makes the events from the beginning."""
        self._again, self.rest, self.moved = self._passed, b"", False

    def _keep(self, comment: bytes) -> None:
        if self._kept is not None:
            self._kept += comment
            if len(self._kept) > MAX_KEPT_BYTES:
                self._kept = None
