"""Addresses and network interfaces of this host."""

import fcntl
import socket
import struct

from deployments.protocol.errors import TransferFailed

_DISCARD = 9  # a port
_SIOCGIFADDR = 0x8915  # see netdevice(7)
_NAME_BYTES, _REQUEST_BYTES = 15, 40


def interface_of(address: str) -> str | None:
    """The name of the interface whose first IPv4 address this is; None: there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_REQUEST_BYTES}s", name.encode()[:_NAME_BYTES])
            try:
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def address_towards(peer: str) -> str:
    """This host's address in the network that leads to another host; that of its own name often is wrong in
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
