"""The fleet's reverse proxy: forwards a request to a replica and streams the response back.

When a replica fails before the first byte of a response was forwarded, the request is sent to another one, so
updates, fences and crashes stay invisible to clients (`forwarding`). Nothing is retried after the first byte.
A list of prompts is answered by several replicas (`parts`).
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from urllib.parse import quote

from multidict import CIMultiDict
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.host.logs import serve_logger
from deployments.protocol.errors import FleetUnavailable, ReplicaUnavailable, SlipstreamError
from deployments.protocol.passed_routes import keeps_state, route_path
from deployments.protocol.routing import KEY_HEADER, PART_HEADER, ROUTER_HEADER, Part, demand_of
from deployments.router.choice.affinity import block_hashes
from deployments.router.connections import PROBE_TIMEOUT_S, SILENCE_S
from deployments.router.deadly_requests import RequestIdentity
from deployments.router.exchange import ExchangeLost, Headers
from deployments.router.forwarding import Begun, Forwarder, Outgoing, Trail
from deployments.router.limits import Returns, RouterLimits
from deployments.router.parts import PartRequest, answer_in_parts, returned
from deployments.router.prompt_lists import MIN_SEQUENCES, PromptList, split_prompts
from deployments.router.request_inspection import check_headers, inspect, read_body
from deployments.router.scrape import Scraped


class PassedStream(Response):
    """The stream of a replica whose answer has begun.

    Args:
        cut_off: told that the replica was lost; returns the last event for the client.
    """

    def __init__(self, begun: Begun, headers: Headers, cut_off: Callable[[ExchangeLost], bytes]) -> None:
        self._cut_off = cut_off
        self._begun = begun
        self.background = None
        self.status_code = begun.answer.status
        self.raw_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; ends when the client leaves."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with asyncio.timeout(None) as limit:
                listening = asyncio.create_task(_listen(receive, lambda: limit.reschedule(0)))
                try:
                    await self._pass(send)
                finally:
                    listening.cancel()
        except OSError:  # also the timeout's: nobody reads any more
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass(self, send: Send) -> None:
        async def take(piece: bytes) -> None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

        try:
            await self._begun.answer.pass_on(take)
        except ExchangeLost as error:
            await take(self._cut_off(error))


async def _listen(receive: Receive, leaves: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    leaves()


# Headers of one connection, or set anew for the next one; and tokens, which were for the router.
NOT_FORWARDED = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "expect", "host", "content-length"}
    | {"authorization", "cookie", "proxy-authorization"}
    | {KEY_HEADER.decode(), PART_HEADER.decode(), ROUTER_HEADER.decode(), "x-weight-timeout"}
)

logger = serve_logger()


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
        self._forwarder = Forwarder(rollout, silence_s=silence_s, probe_timeout_s=probe_timeout_s)
        self.limits = limits
        self.in_flight = 0
        self._returns = Returns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with the response of one replica, or of several to their parts of it.

        Raises:
            FleetUnavailable: too many requests are in flight, or no replica answered in time.
            DeadlyRequest: replicas were lost under it.
            InvalidRequest: a header or the body is wrong.
        """
        limits = self.limits
        if self.in_flight >= limits.max_in_flight:
            raise FleetUnavailable(
                f"the router takes at most {limits.max_in_flight} requests at once; try again",
                {"retry_after_s": self._returns.after_s()},
            )
        self._returns.begun()
        self.in_flight += 1
        try:
            request = Request(scope, receive)
            check_headers(request)
            trail = Trail(demand=demand_of(request.headers, limits.weight_timeout_s))
            body = await read_body(request, limits.max_body_bytes)
            path = quote(route_path(scope["path"], scope.get("root_path", "")))
            inspection = inspect(
                body,
                request.method,
                path,
                in_session=trail.demand.session_id is not None,
                max_sequences=limits.max_sequences,
            )
            outgoing = _outgoing(request, trail, path, body, inspection.sequences)
            trail.demand = replace(trail.demand, stays=keeps_state(path))
            if limits.prefix_affinity and trail.demand.session_id is None:
                outgoing = replace(outgoing, blocks=block_hashes(body))
            # Closing the connections early ends the request in the engines.
            async with self._answer(outgoing, trail, inspection.prompts) as response:
                await response(scope, receive, send)
        finally:
            self.in_flight -= 1

    async def metrics(self) -> Scraped:
        """The Prometheus metrics of every replica and every node."""
        return await self._forwarder.metrics()

    async def close(self) -> None:
        """Close the connections to the replicas."""
        await self._forwarder.close()

    @asynccontextmanager
    async def _answer(
        self, request: Outgoing, trail: Trail, prompts: PromptList | None
    ) -> AsyncIterator[Response]:
        parts = [] if prompts is None else await self._parts(request, trail, prompts)
        if prompts is not None and parts:
            async with answer_in_parts(
                self._forwarder, parts, self.limits, streams=prompts.streams
            ) as response:
                yield response
            return
        begun = await self._forwarder.forward(request, trail, self.limits)
        async with begun.connection:
            yield self._response(begun, request.identity)

    async def _parts(self, request: Outgoing, trail: Trail, prompts: PromptList) -> list[PartRequest]:
        """The parts of a request, each with the replica that it is meant for; none: it is not split."""
        if request.sequences < 2 * MIN_SEQUENCES:
            return []
        loads = await self._forwarder.loads(trail.demand)
        created = int(time.time())
        parts = []
        for share in split_prompts(len(prompts.prompts), prompts.completions, loads):
            part = Part(first_choice=share.start * prompts.completions, created=created)
            outgoing = replace(
                request,
                headers=CIMultiDict([*request.headers.items(), (PART_HEADER.decode(), part.header())]),
                body=prompts.part(share.start, share.stop),
                blocks=(),
                sequences=(share.stop - share.start) * prompts.completions,
            )
            demand = replace(trail.demand, prefer=share.replica_id)
            parts.append(PartRequest(request=outgoing, trail=Trail(demand=demand)))
        return parts

    def _response(self, begun: Begun, identity: RequestIdentity) -> Response:
        if begun.whole is None:
            return PassedStream(begun, returned(begun), lambda error: self._cut_off(begun, identity, error))
        response = Response(begun.whole, begun.answer.status)
        response.raw_headers = returned(begun)
        return response

    def _cut_off(self, begun: Begun, identity: RequestIdentity, error: ExchangeLost) -> bytes:
        """A replica was lost in the middle of a stream: the client's last event."""
        refused = self._forwarder.deadly.cut_off(identity, begun.replica_id)
        text = f"replica {begun.replica_id} was lost in the middle of a stream: {error}"
        if refused:
            logger.error("%s; %s %s is refused from now on", text, identity.method, identity.path)
        else:
            logger.warning(text)
        return _last_event(
            identity.path, ReplicaUnavailable("the replica that streamed this answer was lost")
        )


def _last_event(path: str, error: SlipstreamError) -> bytes:
    """An error as clients of this stream expect it. Anthropic's skip events that have no name, and would take
    what came before for the whole answer."""
    body, name = error.body(), b""
    if path == "/v1/messages":
        body, name = {"type": "error", **body}, b"event: error\n"
    # An event that was cut off in the middle ends here.
    return b"\n\n" + name + b"data: " + json.dumps(body).encode() + b"\n\n"


def _outgoing(request: Request, trail: Trail, path: str, body: bytes, asked_for: int) -> Outgoing:
    """What is forwarded of a request: its path without Serve's route prefix."""
    query = request.scope["query_string"].decode("latin-1")
    forwarded = [(name, value) for name, value in request.headers.items() if name not in NOT_FORWARDED]
    return Outgoing(
        method=request.method,
        target=f"{path}?{query}" if query else path,
        headers=CIMultiDict([*forwarded, ("x-weight-timeout", str(trail.demand.timeout_s))]),
        body=body,
        sequences=asked_for,
        identity=RequestIdentity(request.method, path, body),
    )
