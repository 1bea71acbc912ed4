"""The router's connections to the replicas."""

import socket

import aiohttp

CONNECT_TIMEOUT_S = 10.0
SOCKET_OPTIONS = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}


def connections() -> aiohttp.ClientSession:
    """A session without a limit of connections or of time: an answer takes as long as it takes."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, socket_factory=_socket),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        auto_decompress=False,
        skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that notices a dead host, whether it waits or sends; a dead process closes its connections."""
    family, kind, protocol, _, _ = address
    created = socket.socket(family, kind, protocol)
    created.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in SOCKET_OPTIONS.items():
        if hasattr(socket, option):
            created.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return created
