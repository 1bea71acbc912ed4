import socket

import psutil

from deployments.protocol.errors import TransferFailed

_DISCARD = 9  # the port of the discard protocol


def host_port(host: str, port: int) -> str:
    """As in URLs: `[::1]:80` for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def interface_of(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None


def address_towards(peer: str) -> str:
    """This host's address in the network towards another host; that of its own name is often wrong in
    containers. Raises ValueError (no such host) or TransferFailed (no network leads there)."""
    here = socket.gethostname()
    try:
        family, *_, address = socket.getaddrinfo(peer, _DISCARD, type=socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:
        raise ValueError(
            f"expected an IP address, or a name that {here} can resolve, got {peer!r} ({error.strerror})"
        ) from error
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)  # sends no packet
        except OSError as error:
            raise TransferFailed(f"{here} has no route to {peer}: {error}") from error
        return str(probe.getsockname()[0])
