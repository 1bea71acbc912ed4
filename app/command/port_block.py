"""The ports of one fleet's HAProxy, fallback proxy and routers: no other fleet of this machine has them.

By default they are the same for every cluster of a machine. That is worse than a start that fails. HAProxy
sends requests to the fallback proxy's port while its router does not answer, and Serve's proxies share a port
(SO_REUSEPORT): a fleet whose router stood still was seen to answer with the weights of the fleet beside it.
Likewise the port of a router that is gone may be that of another fleet's router a moment later.
"""

import errno
import random
import socket
from contextlib import ExitStack

# Below the range from which the system assigns ports: HAProxy starts late, and a port of that range could
# belong to one of Ray's workers by then.
_FIRST, _END = 20_000, 32_600
_SIZE = 200  # Serve keeps the port of a router that has ended out of use for two minutes
_NAMED = 4  # the claim, HAProxy's metrics and statistics, the fallback proxy
_TRIES = 1000


class PortBlock:
    """Adjacent ports. The first is listened on as long as the block is held, so that nobody else takes it.

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
