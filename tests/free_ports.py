import random
import socket

_PORTS = range(10_000, 20_000)  # below the system's range: Serve listens a minute after its port was chosen


def free_ports(count: int) -> list[int]:
    """Ports without a listener."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        found.append(port)
        if len(found) == count:
            break
    return found
