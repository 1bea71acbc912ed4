"""Ports of this machine for a fleet that starts: none that the system assigns to others meanwhile."""

import errno
import random
import socket
from contextlib import ExitStack

# Below the range from which the system assigns ports: Serve and HAProxy start late, and a port of that range
# could belong to one of Ray's workers by then.
_SINGLE = range(10_000, 20_000)
_FIRST, _END = 20_000, 32_600
_SIZE = 200  # Serve keeps the port of a router that has ended out of use for two minutes
_NAMED = 4  # the claim, HAProxy's metrics and statistics, the fallback proxy
_TRIES = 1000


class PortBlock:
    """Adjacent ports of a fleet's HAProxy, fallback proxy and routers: no other fleet has them.

    The first is listened on as long as the block is held.

    By default they are the same for every cluster of a machine. That is worse than a start that fails.
    HAProxy sends requests to the fallback proxy's port while its router does not answer, and Serve's proxies
    share a port (SO_REUSEPORT): a fleet whose router stood still was seen to answer with the weights of the
    fleet beside it. Likewise the port of a router that is gone may be that of another fleet's router a moment
    later.

    Raises:
        OSError: no block is free.
    """

    def __init__(self) -> None:
        self._claim, self._first = _claimed()
        self.metrics, self.statistics, self.fallback = range(self._first + 1, self._first + _NAMED)

    @property
    def routers(self) -> range:
        """Ports of router replicas."""
        return range(self._first + _NAMED, self._first + _SIZE)

    def close(self) -> None:
        """Let others have it."""
        self._claim.close()


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on now.

    Raises:
        OSError: there are not so many.
    """
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
    """A block of which nobody uses a port that has a name: what claims it, and its first port."""
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
