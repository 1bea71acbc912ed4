"""What a router keeps of a stream to continue it elsewhere; see `deployments.replica.continuation`."""

from deployments.protocol.rollouts import MOVED, NOT_CONTINUED, SAID
from deployments.protocol.routing import ERROR_EVENTS

MAX_KEPT_BYTES = 1 << 26  # about a million tokens
END = b"\n\n"


class CutStream:
    """A stream of events of one request, from one replica after another.

    Attributes:
        said: what the replicas said of it; None: it cannot be continued.
        rest: the beginning of an event, which is not passed before its end.
        moved: the replica ended the stream because it is being stopped.
    """

    def __init__(self) -> None:
        self.said: bytearray | None = bytearray()
        self.rest = b""
        self.moved = False
        self._passed = 0  # events that the client has
        self._again = 0  # events that come again and are dropped

    def events(self, piece: bytes) -> bytes:
        """The events that a piece of the stream completes, but comments, and those that the client has."""
        passed = []
        *events, self.rest = (self.rest + piece).split(END)
        for event in events:
            if event.startswith(ERROR_EVENTS):
                self._again = 0  # the client has no such event
            if event.startswith(SAID):
                self._keep(event[len(SAID) :])
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

    def _keep(self, said: bytes) -> None:
        if said == MOVED:
            self.moved = True
        elif self.said is not None:
            self.said += said + b"\n"
            if said == NOT_CONTINUED or len(self.said) > MAX_KEPT_BYTES:
                self.said = None
