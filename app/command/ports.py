"""A block of ports for each fleet, below the range from which the system assigns ports."""

import errno
import random
import socket
from contextlib import ExitStack

DASHBOARD_PORT = 8265  # Ray's, where jobs are submitted
_FIRST, _END = 20_000, 32_600
_SIZE = 200  # Serve does not reuse the port of a stopped router for two minutes
_RAY = 7
_NAMED = 4 + _RAY  # the claim, HAProxy's metrics and statistics, the fallback proxy, Ray's
_TRIES = 1000


class PortBlock:
    """Adjacent ports for one fleet; the first stays bound until `close`, so no other fleet takes the block.

    Serve's defaults are the same for every cluster of a machine, and its proxies share a port (SO_REUSEPORT):
    a fleet whose router stalled was seen to answer with another fleet's weights. Serve and HAProxy bind late;
    by then a Ray worker could hold a port of the system's range.

    Raises:
        OSError: no block is free.
    """

    def __init__(self) -> None:
        self._claim, self._first = _claimed()
        self.metrics, self.statistics, self.fallback, *self.ray = range(self._first + 1, self._first + _NAMED)

    @property
    def routers(self) -> range:
        return range(self._first + _NAMED, self._first + _SIZE)

    def close(self) -> None:
        self._claim.close()


def _claimed() -> tuple[socket.socket, int]:
    """The bound socket and the first port of a block whose named ports are free."""
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
