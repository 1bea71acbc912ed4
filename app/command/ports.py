"""Ports for a fleet that starts: outside the range that the system assigns to others meanwhile."""

import errno
import random
import socket
from contextlib import ExitStack

DASHBOARD_PORT = 8265  # of Ray, where jobs are submitted
# Below the system's ephemeral range: Serve and HAProxy start late, and one of Ray's workers could have taken
# such a port by then.
_SINGLE = range(10_000, 20_000)
_FIRST, _END = 20_000, 32_600
_SIZE = 200  # Serve does not reuse the port of a stopped router for two minutes
_NAMED = 4  # the claim, HAProxy's metrics and statistics, the fallback proxy
_TRIES = 1000


class PortBlock:
    """Adjacent ports of a fleet's HAProxy, fallback proxy and routers, which no other fleet has.

    The first port is bound as long as the block is held.

    Serve's defaults are the same for every cluster of a machine. HAProxy sends requests to the fallback
    proxy's port while its router does not respond, and Serve's proxies share a port (SO_REUSEPORT): a fleet
    whose router stalled was seen to answer with another fleet's weights.

    Raises:
        OSError: no block is free.
    """

    def __init__(self) -> None:
        self._claim, self._first = _claimed()
        self.metrics, self.statistics, self.fallback = range(self._first + 1, self._first + _NAMED)

    @property
    def routers(self) -> range:
        return range(self._first + _NAMED, self._first + _SIZE)

    def close(self) -> None:
        self._claim.close()


def free_ports(count: int) -> list[int]:
    """Ports without a listener. Raises OSError if there are too few."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_SINGLE, len(_SINGLE)):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        found.append(port)
        if len(found) == count:
            return found
    raise OSError(
        errno.EADDRINUSE, f"fewer than {count} ports from {_SINGLE.start} to {_SINGLE.stop} are free"
    )


def _claimed() -> tuple[socket.socket, int]:
    """A block whose named ports are free: the socket that claims it, and its first port."""
    for _ in range(_TRIES):
        first = random.randrange(_FIRST, _END, _SIZE)
        with ExitStack() as probes:
            try:
                claim, *_ = [
                    probes.enter_context(socket.create_server(("127.0.0.1", port)))
                    for port in range(first, first + _NAMED)
                ]
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return claim.dup(), first
    raise OSError(errno.EADDRINUSE, f"no block of {_SIZE} ports from {_FIRST} to {_END} is free")
