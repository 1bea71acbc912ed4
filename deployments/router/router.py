"""The fleet's reverse proxy: forwards a request to a replica and streams the response back.

Serve's request router chooses the replica. The request and its response go over a connection to that
replica's own HTTP server. When a replica fails before the first byte of a response was forwarded, the
request is sent to another one, so updates, fences and crashes stay invisible to clients. Nothing is
retried after the first byte. A request under which replicas are lost again and again is refused.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
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

from deployments.errors import DeadlyRequest, FleetUnavailable, ReplicaUnavailable
from deployments.logs import serve_logger
from deployments.passed_routes import route_path
from deployments.replica_info import ReplicaEndpoint
from deployments.request_headers import KEY_HEADER, LOST, REFUSED_HEADER, Demand, demand_of
from deployments.router.body import read_body
from deployments.router.bounds import check_headers, check_sequences
from deployments.router.connections import connections
from deployments.router.deadly_requests import DeadlyRequests, RequestIdentity
from deployments.router.silence import PROBE_TIMEOUT_S, SILENCE_S, Patience, Probes

# Headers of one connection, or set anew for the next one; and tokens, which were for the router.
NOT_FORWARDED = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "expect", "host", "content-length"}
    | {"authorization", "cookie", "proxy-authorization"}
)
NOT_RETURNED = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server"})
RETRY_PAUSE_S = 0.05
MAX_REFUSALS = 8  # that a request remembers
logger = serve_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    """The limits of one router replica; the settings are in `RouterConfig`."""

    max_in_flight: int
    max_body_bytes: int
    max_sequences: int  # of one request: prompts times answers to each
    retry_after_s: float
    find_replica_timeout_s: float  # how long a request looks for a replica; generating is not looking
    weight_timeout_s: float  # how long it waits for a version, without x-weight-timeout

    def with_settings(self, settings: Mapping[str, float]) -> "RouterLimits":
        """The same with what a live fleet may change, by the names of the settings."""
        return replace(
            self,
            max_in_flight=int(settings["max_ongoing_requests"] + settings["max_queued_requests"]),
            retry_after_s=settings["retry_after_s"],
            find_replica_timeout_s=settings["request_timeout_s"],
            weight_timeout_s=settings["request_timeout_s"],
        )


class _NotBegun(Exception):
    """A replica refuses the request, or cannot be reached; its engine never had it."""


class _Lost(Exception):
    """A replica was lost, or its engine failed, after the request had reached it."""


class Router:
    """An ASGI application that forwards requests to the replicas, at most `max_in_flight` at a time.

    As an ASGI application it counts a request for exactly as long as its response is being sent.
    """

    def __init__(
        self,
        rollout: DeploymentHandle,
        limits: RouterLimits,
        *,
        silence_s: float = SILENCE_S,
        probe_timeout_s: float = PROBE_TIMEOUT_S,
    ) -> None:
        self._silence_s = silence_s
        self._probe_timeout_s = probe_timeout_s
        self._probes = Probes(self._answers)
        self._rollout = rollout
        self.limits = limits
        self._session: aiohttp.ClientSession | None = None
        self._per_replica: Counter[str] = Counter()  # requests in flight
        self._deadly = DeadlyRequests()
        self.in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with the response of one replica.

        Raises:
            FleetUnavailable: too many requests are in flight, or no replica answered in time.
            DeadlyRequest: replicas were lost under it.
            InvalidRequest: a header or the body is wrong.
        """
        if self.in_flight >= self.limits.max_in_flight:
            raise FleetUnavailable(
                f"the router takes at most {self.limits.max_in_flight} requests at once; try again",
                {"retry_after_s": self.limits.retry_after_s},
            )
        self.in_flight += 1
        try:
            request = Request(scope, receive)
            check_headers(request)
            demand = demand_of(request.headers, self.limits.weight_timeout_s)
            body = await read_body(request, self.limits.max_body_bytes)
            check_sequences(body, self.limits.max_sequences)
            answer, patience, connection = await self._forward(request, demand, body)
            # Closing the connection early ends the request in the engine.
            async with connection:
                response = await _response(answer, patience)
                await response(scope, receive, send)
        finally:
            self.in_flight -= 1

    async def close(self) -> None:
        """Close the connections to the replicas."""
        if self._session is not None:
            await self._session.close()

    async def _forward(self, request: Request, demand: Demand, body: bytes) -> "_Begun":
        """The first response that is not a refusal, and its connection; tries replica after replica.

        Raises:
            FleetUnavailable: `find_replica_timeout_s` went by without a replica that could answer.
            DeadlyRequest: replicas were lost under it.
        """
        deadline = time.monotonic() + self.limits.find_replica_timeout_s
        identity = RequestIdentity(request.method, _target(request).partition("?")[0], body)
        reason = "no replica is ready"
        lost: list[str] = []
        self._deadly.check(identity)
        while True:
            try:
                replica_id, endpoint = await self._choose(demand, deadline)
            except (BackPressureError, DeploymentUnavailableError) as error:
                reason = _first_line(error)
            except TimeoutError:
                pass  # no replica could be chosen: the last reason says why
            else:
                self._deadly.check(identity)  # again: it may have waited long for a replica
                began = time.monotonic()
                try:
                    return await self._attempt(replica_id, endpoint, request, demand, body)
                except _NotBegun as error:
                    reason = str(error)
                except _Lost as error:
                    reason = str(error)
                    lost.append(replica_id)
                    self._count_loss(identity, lost, reason)
                    deadline += time.monotonic() - began  # its engine was at work: that was no search
                demand = replace(demand, refused=(*demand.refused, replica_id)[-MAX_REFUSALS:])
            if time.monotonic() > deadline:
                raise FleetUnavailable(
                    f"no replica could answer within {self.limits.find_replica_timeout_s:g} s: {reason}",
                    {"retry_after_s": self.limits.retry_after_s},
                )
            await asyncio.sleep(RETRY_PAUSE_S)

    def _count_loss(self, identity: RequestIdentity, lost: Sequence[str], reason: str) -> None:
        try:
            self._deadly.lost(identity, lost)
        except DeadlyRequest as refused:
            logger.error("%s %s is refused: %s; %s", identity.method, identity.path, refused.message, reason)
            raise

    async def _attempt(
        self, replica_id: str, endpoint: ReplicaEndpoint, request: Request, demand: Demand, body: bytes
    ) -> "_Begun":
        """The response of one replica, and its connection.

        Raises:
            _NotBegun: the replica refuses the request, or cannot be reached.
            _Lost: the request reached the replica, which then failed.
        """
        url = f"http://{endpoint.address}{_target(request)}"
        headers = _headers(request, demand)
        headers[KEY_HEADER.decode()] = endpoint.key
        try:
            async with AsyncExitStack() as connection:
                async with asyncio.timeout(None) as limit:
                    patience = self._patience(endpoint, lambda: limit.reschedule(0))
                    connection.callback(patience.close)
                    answer = await connection.enter_async_context(
                        self._request(replica_id, request.method, url, headers, body)
                    )
                    refusal = answer.headers.get(REFUSED_HEADER.decode())
                    if refusal is not None:
                        reason = (await answer.json())["error"]["message"]
                        raise _Lost(reason) if refusal == LOST.decode() else _NotBegun(reason)
                    if answer.content_length is not None:
                        await answer.read()  # a replica that is lost here can still be replaced
                patience.give_up = answer.close
                return answer, patience, connection.pop_all()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _NotBegun(f"replica {replica_id} does not answer: {_first_line(error)}") from error
        except aiohttp.ClientError as error:
            # Whether its engine had begun, a broken connection does not say: it counts.
            raise _Lost(f"replica {replica_id} does not answer: {_first_line(error)}") from error
        except TimeoutError as error:
            raise _Lost(f"replica {replica_id} is silent, and answers nothing else either") from error

    def _patience(self, endpoint: ReplicaEndpoint, give_up: Callable[[], None]) -> Patience:
        return Patience(lambda: self._probes.alive(endpoint.address, endpoint.key), give_up, self._silence_s)

    async def _answers(self, address: str, key: str) -> bool:
        """Whether a replica's server answers; what, is all the same: it has no route `/`."""
        if self._session is None:
            return True
        timeout = aiohttp.ClientTimeout(total=self._probe_timeout_s)
        headers = {KEY_HEADER.decode(): key}
        try:
            async with self._session.get(f"http://{address}/", headers=headers, timeout=timeout):
                return True
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _choose(self, demand: Demand, deadline: float) -> tuple[str, ReplicaEndpoint]:
        """The id and the endpoint of the replica to try; waits while there is none.

        Raises:
            TimeoutError: there was none until the deadline.
        """
        current = replace(demand, in_flight=dict(self._per_replica))
        async with asyncio.timeout(deadline - time.monotonic()):
            # Without a reservation: it costs two calls to the replica, and our own count is more exact.
            async with self._rollout.choose_replica(current, _reserve=False) as chosen:
                return chosen.replica_id, ReplicaEndpoint(**chosen.replica_metadata)

    @asynccontextmanager
    async def _request(
        self, replica_id: str, method: str, url: str, headers: CIMultiDict[str], body: bytes
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:  # created here, in the event loop that serves requests
            self._session = connections()
        self._per_replica[replica_id] += 1
        try:
            async with self._session.request(
                method, URL(url, encoded=True), headers=headers, data=body or None, allow_redirects=False
            ) as answer:
                yield answer
        finally:
            self._per_replica[replica_id] -= 1


_Begun = tuple[aiohttp.ClientResponse, Patience, AsyncExitStack]  # of a replica: its answer has begun


def _target(request: Request) -> str:
    """The path, without Serve's route prefix, and the query."""
    path = quote(route_path(request.scope["path"], request.scope.get("root_path", "")))
    query = request.scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def _headers(request: Request, demand: Demand) -> CIMultiDict[str]:
    excluded = NOT_FORWARDED | {KEY_HEADER.decode(), "x-weight-timeout"}
    forwarded = [(name, value) for name, value in request.headers.items() if name not in excluded]
    return CIMultiDict([*forwarded, ("x-weight-timeout", str(demand.timeout_s))])


async def _response(answer: aiohttp.ClientResponse, patience: Patience) -> Response:
    headers = [(name.lower(), value) for name, value in answer.raw_headers]
    response: Response
    if answer.content_length is not None:
        response = Response(await answer.read(), answer.status)
    else:
        response = StreamingResponse(_stream(answer, patience), answer.status)
    response.raw_headers = [(name, value) for name, value in headers if name not in NOT_RETURNED]
    return response


async def _stream(answer: aiohttp.ClientResponse, patience: Patience) -> AsyncIterator[bytes]:
    try:
        async for part in answer.content.iter_any():
            patience.heard()
            yield part
    except aiohttp.ClientError as error:
        logger.warning("a replica was lost in the middle of a stream: %s", _first_line(error))
        lost = ReplicaUnavailable("the replica that streamed this answer was lost")
        yield b"data: " + json.dumps(lost.body()).encode() + b"\n\n"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
