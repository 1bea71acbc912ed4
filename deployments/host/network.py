"""Network interfaces of this host."""

import fcntl
import socket
import struct

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
