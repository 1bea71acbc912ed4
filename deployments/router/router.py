"""The fleet's front: passes HTTP through to a replica, and streams the answer back.

Serve's request router names the replica; the request and its answer go over a connection to that
replica's own server. A request that no byte was answered to yet moves on to another replica when its own
fails, so an update, a fence or a crash is not the client's business. Nothing is retried after the
first byte.
"""

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from urllib.parse import quote

import aiohttp
from multidict import CIMultiDict
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from yarl import URL

from deployments.errors import FleetUnavailable, PayloadTooLarge, ReplicaUnavailable
from deployments.logs import serve_logger
from deployments.request_headers import KEY_HEADER, REFUSED_HEADER, Demand, demand_of

# Of one connection and not of the request, or set anew.
NOT_FORWARDED = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "expect", "host", "content-length"}
)
NOT_RETURNED = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server"})
RETRY_PAUSE_S = 0.05
CONNECT_TIMEOUT_S = 10.0
logger = serve_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    """Attributes: see `RouterConfig`; all of one router replica."""

    max_in_flight: int
    max_body_bytes: int
    retry_after_s: float
    find_replica_timeout_s: float  # how long a request waits for a replica that may answer it
    weight_timeout_s: float  # how long it waits for a version, without x-weight-timeout


class Router:
    """Forwards requests to the rollout replicas: an ASGI application, so that a place is held exactly
    as long as the request is there."""

    def __init__(self, rollout: DeploymentHandle, limits: RouterLimits) -> None:
        self._rollout = rollout
        self._limits = limits
        self._session: aiohttp.ClientSession | None = None
        self._at: Counter[str] = Counter()  # requests at each replica
        self.in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request from one of the replicas.

        Raises:
            SlipstreamError: with its HTTP status.
        """
        if self.in_flight >= self._limits.max_in_flight:
            raise FleetUnavailable(
                f"the router takes at most {self._limits.max_in_flight} requests at once; try again",
                {"retry_after_s": self._limits.retry_after_s},
            )
        self.in_flight += 1
        try:
            request = Request(scope, receive)
            demand = demand_of(request.headers, self._limits.weight_timeout_s)
            body = await read_body(request, self._limits.max_body_bytes)
            answer, held = await self._answer(request, demand, body)
            async with held:  # left early, it closes the connection, which ends the request in the engine
                response = await _response(answer)
                await response(scope, receive, send)
        finally:
            self.in_flight -= 1

    async def close(self) -> None:
        """Close the connections to the replicas."""
        if self._session is not None:
            await self._session.close()

    async def _answer(
        self, request: Request, demand: Demand, body: bytes
    ) -> tuple[aiohttp.ClientResponse, AsyncExitStack]:
        """A replica's answer of which nothing has been sent on; tries replica after replica."""
        deadline = time.monotonic() + self._limits.find_replica_timeout_s
        path = quote(request.scope["path"].removeprefix(request.scope.get("root_path", "")))  # Serve's prefix
        query = request.scope["query_string"].decode("latin-1")
        target = f"{path}?{query}" if query else path
        headers = _headers(request, demand)
        reason = "no replica is ready"
        while True:
            replica_id = None
            try:
                replica_id, address, key = await self._choose(demand, deadline)
                headers[KEY_HEADER.decode()] = key
                async with AsyncExitStack() as attempt:
                    call = self._asked(replica_id, request.method, f"http://{address}{target}", headers, body)
                    answer = await attempt.enter_async_context(call)
                    if REFUSED_HEADER.decode() not in answer.headers:
                        if answer.content_length is not None:
                            await answer.read()  # a replica that is lost now has done no harm yet
                        return answer, attempt.pop_all()
                    reason = (await answer.json())["error"]["message"]
            except aiohttp.ClientError as error:
                reason = f"replica {replica_id} does not answer: {_first_line(error)}"
            except (BackPressureError, DeploymentUnavailableError, TimeoutError) as error:
                reason = reason if isinstance(error, TimeoutError) else _first_line(error)
            if time.monotonic() > deadline:
                raise FleetUnavailable(
                    f"no replica could answer within {self._limits.find_replica_timeout_s:g} s: {reason}",
                    {"retry_after_s": self._limits.retry_after_s},
                )
            if replica_id is not None:
                demand = replace(demand, refused=(*demand.refused[-7:], replica_id))
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _choose(self, demand: Demand, deadline: float) -> tuple[str, str, str]:
        """Id, address and key of the replica to ask; waits while there is none.

        Raises:
            TimeoutError: there was none until the deadline.
        """
        asked = replace(demand, in_flight=dict(self._at))
        async with asyncio.timeout(deadline - time.monotonic()):
            # Without a reservation: it costs two calls to the replica, and our own count serves better.
            async with self._rollout.choose_replica(asked, _reserve=False) as chosen:
                return chosen.replica_id, chosen.replica_metadata["address"], chosen.replica_metadata["key"]

    @asynccontextmanager
    async def _asked(
        self, replica_id: str, method: str, url: str, headers: CIMultiDict[str], body: bytes
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:  # in the event loop that serves requests
            self._session = _connections()
        self._at[replica_id] += 1
        try:
            async with self._session.request(
                method, URL(url, encoded=True), headers=headers, data=body or None, allow_redirects=False
            ) as answer:
                yield answer
        finally:
            self._at[replica_id] -= 1


def _connections() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, socket_factory=_socket),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        auto_decompress=False,
        skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that notices a host that has gone without a word; a process that dies says so."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made


def _headers(request: Request, demand: Demand) -> CIMultiDict[str]:
    own = {KEY_HEADER.decode(), "x-weight-timeout"}
    kept = [(name, value) for name, value in request.headers.items() if name not in NOT_FORWARDED | own]
    return CIMultiDict([*kept, ("x-weight-timeout", str(demand.timeout_s))])


async def _response(answer: aiohttp.ClientResponse) -> Response:
    headers = [(name.lower(), value) for name, value in answer.raw_headers]
    response: Response
    if answer.content_length is not None:
        response = Response(await answer.read(), answer.status)
    else:
        response = StreamingResponse(_pieces(answer), answer.status)
    response.raw_headers = [(name, value) for name, value in headers if name not in NOT_RETURNED]
    return response


async def _pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.content.iter_any():
            yield piece
    except aiohttp.ClientError as error:
        logger.warning("a replica was lost in the middle of a stream: %s", _first_line(error))
        lost = ReplicaUnavailable("the replica that streamed this answer was lost")
        yield b"data: " + json.dumps(lost.body()).encode() + b"\n\n"


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The request's body.

    Raises:
        PayloadTooLarge: more than `max_bytes`.
    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise PayloadTooLarge(
                f"the body must have at most {max_bytes} bytes", {"max_body_bytes": max_bytes}
            )
    return bytes(body)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
