"""The fleet's reverse proxy.

A replica that fails before the first byte of its response is replaced (`forwarding`). A list of prompts is
split (`parts`).
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from urllib.parse import quote

from multidict import CIMultiDict
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.host.logs import serve_logger
from deployments.protocol.errors import FleetUnavailable, ReplicaUnavailable, SlipstreamError
from deployments.protocol.passed_routes import keeps_state, route_path
from deployments.protocol.rollouts import CONTINUE_HEADER, SAID_HEADER, TURN_HEADER, RolloutRequest
from deployments.protocol.routing import KEY_HEADER, PART_HEADER, ROUTER_HEADER, Part, demand_of
from deployments.router.affinity import block_hashes
from deployments.router.cut_streams import CutStream
from deployments.router.deadly_requests import RequestIdentity
from deployments.router.forwarding import (
    PROBE_TIMEOUT_S,
    RETRY_AFTER_S,
    SILENCE_S,
    AttemptHistory,
    Forwarder,
    Outgoing,
    RouterLimits,
    StartedResponse,
)
from deployments.router.http_client import Headers, ResponseLost
from deployments.router.parts import respond_in_parts, response_of, returned_headers
from deployments.router.prompt_lists import MIN_SEQUENCES, PromptList, split_prompts
from deployments.router.request_inspection import check_headers, inspect, read_body
from deployments.router.scrape import Scraped
from deployments.serve.instruments import REQUESTS, REROUTED, Record, record

SAID_NAME = SAID_HEADER.decode()
# Hop-by-hop headers, headers set for the replica, and tokens.
NOT_FORWARDED = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "expect", "host", "content-length"}
    | {"authorization", "cookie", "proxy-authorization", "x-api-key"}
    | {KEY_HEADER.decode(), PART_HEADER.decode(), ROUTER_HEADER.decode(), "x-weight-timeout"}
    | {TURN_HEADER.decode(), SAID_NAME}
)
logger = serve_logger()


MIN_RETRIES_PER_S = 200.0
RETRIES_PER_ADMITTED = 2.0  # keeps places from staying free
MAX_PACING_S = 20.0  # OpenAI's clients wait for 60 s at most
PERIOD_S = 2.0


class RetryAfterPacing:
    """Spreads refused clients' retries. If a thousand retried after a second, refusing them would cost more
    than serving the others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_retry = 0.0  # not yet given to a client
        self._per_s = MIN_RETRIES_PER_S
        self._admitted = 0
        self._period_began = clock()

    def admitted(self) -> None:
        self._admitted += 1

    def retry_after_s(self) -> float:
        now = self._clock()
        if (elapsed := now - self._period_began) >= PERIOD_S:
            self._per_s = max(MIN_RETRIES_PER_S, RETRIES_PER_ADMITTED * self._admitted / elapsed)
            self._admitted, self._period_began = 0, now
        self._next_retry = min(max(self._next_retry, now) + 1 / self._per_s, now + MAX_PACING_S)
        return RETRY_AFTER_S + self._next_retry - now


class StreamProxy(Response):
    """Streams a replica's response until the client disconnects.

    One coroutine, without Starlette's generators and task group: it runs per event.

    Args:
        lost: called when a replica was lost; returns the response of another one, or the client's last event.
        cut: what is kept to continue the stream; None: it is not continued.
        survived: called when a continued stream has ended as it should.
    """

    def __init__(
        self,
        started: StartedResponse,
        headers: Headers,
        lost: Callable[[StartedResponse, ResponseLost], Awaitable[StartedResponse | bytes]],
        cut: CutStream | None,
        survived: Callable[[], None],
    ) -> None:
        self._lost = lost
        self._survived = survived
        self._cut = cut
        self._started = started
        self.background = None
        self.status_code = started.response.status
        self.raw_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with asyncio.timeout(None) as limit:
                listening = asyncio.create_task(_until_disconnect(receive, lambda: limit.reschedule(0)))
                try:
                    await self._pass_on(send)
                finally:
                    listening.cancel()
        except OSError:  # the client is gone; includes TimeoutError
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass_on(self, send: Send) -> None:
        async def take(piece: bytes) -> None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

        async def take_frame(piece: bytes) -> None:
            assert cut is not None
            if events := cut.events(piece):
                await send({"type": "http.response.body", "body": events, "more_body": True})

        started, cut = self._started, self._cut
        while True:
            async with started.connection:
                try:
                    await started.response.pass_on(take if cut is None else take_frame, joined=cut is None)
                    if cut is None or not cut.is_short:
                        break
                    raise ResponseLost("it ended before what the client has")
                except ResponseLost as error:
                    after = await self._lost(started, error)
            if isinstance(after, bytes):
                return await take(after)
            started = after
        if started is not self._started:
            self._survived()


async def _until_disconnect(receive: Receive, stop: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stop()


class Router:
    def __init__(
        self,
        rollout: DeploymentHandle,
        limits: RouterLimits,
        *,
        silence_s: float = SILENCE_S,
        probe_timeout_s: float = PROBE_TIMEOUT_S,
        record: Record = record,
    ) -> None:
        self._record = record
        self._forwarder = Forwarder(
            rollout, silence_s=silence_s, probe_timeout_s=probe_timeout_s, record=record
        )
        self.limits = limits
        self.in_flight = 0
        self._pacing = RetryAfterPacing()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond with one replica's response, or with merged ones.

        Raises:
            FleetUnavailable: too many requests in flight, or no replica responded in time.
            DeadlyRequest: replicas were lost under the request.
            InvalidRequest: wrong headers or body.
        """
        limits = self.limits
        if self.in_flight >= limits.max_ongoing_requests:
            self._record(REQUESTS, outcome="busy")
            raise FleetUnavailable(
                f"the router takes at most {limits.max_ongoing_requests} requests at once; try again",
                {"retry_after_s": self._pacing.retry_after_s()},
            )
        self._pacing.admitted()
        self.in_flight += 1
        outcome = "left"
        try:
            request = Request(scope, receive)
            check_headers(request)
            attempts = AttemptHistory(demand=demand_of(request.headers, limits.request_timeout_s))
            body = await read_body(request, limits.max_body_bytes)
            path = quote(route_path(scope["path"], scope.get("root_path", "")))
            in_session = attempts.demand.session_id is not None
            turn = scope.get("rollout")
            whole = in_session or turn is not None
            inspection = inspect(body, request.method, path, in_session=whole)
            outgoing = _outgoing(request, attempts, path, body, inspection.sequences, turn)
            attempts.demand = replace(attempts.demand, stays=keeps_state(path))
            if not in_session:
                outgoing = replace(outgoing, blocks=block_hashes(body))
            # Leaving closes the connections, which aborts the request in the engines.
            async with self._respond(outgoing, attempts, inspection.prompts) as response:
                await response(scope, receive, send)
            outcome = "answered"
        except SlipstreamError as error:
            outcome = error.type
            raise
        finally:
            self.in_flight -= 1
            self._record(REQUESTS, outcome=outcome)

    async def metrics(self, names: Sequence[str] = ()) -> Scraped:
        return await self._forwarder.metrics(names)

    async def close(self) -> None:
        await self._forwarder.close()

    @asynccontextmanager
    async def _respond(
        self, request: Outgoing, attempts: AttemptHistory, prompts: PromptList | None
    ) -> AsyncIterator[Response]:
        parts = [] if prompts is None else await self._parts(request, attempts, prompts)
        if prompts is not None and parts:
            yield await respond_in_parts(self._forwarder, parts, self.limits)
            return
        started = await self._forwarder.forward(request, attempts, self.limits)
        async with started.connection:
            yield self._response(started, request, attempts)

    async def _parts(
        self, request: Outgoing, attempts: AttemptHistory, prompts: PromptList
    ) -> list[tuple[Outgoing, AttemptHistory]]:
        if request.sequences < 2 * MIN_SEQUENCES:
            return []
        loads = await self._forwarder.loads(attempts.demand)
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
            demand = replace(attempts.demand, prefer=share.replica_id)
            parts.append((outgoing, AttemptHistory(demand=demand)))
        return parts

    def _response(self, started: StartedResponse, request: Outgoing, attempts: AttemptHistory) -> Response:
        if started.whole is not None:
            return response_of(started.whole, started)
        cut = None if started.response.header(SAID_HEADER) is None else CutStream()
        lost = partial(self._lost, request, attempts, cut)
        survived = partial(self._forwarder.deadly.survived, request.identity)
        return StreamProxy(started, returned_headers(started), lost, cut, survived)

    async def _lost(
        self,
        request: Outgoing,
        attempts: AttemptHistory,
        cut: CutStream | None,
        started: StartedResponse,
        error: ResponseLost,
    ) -> StartedResponse | bytes:
        """The replica's response that continues a stream, or the client's last event."""
        identity = request.identity
        moved = cut is not None and cut.moved
        refused = not moved and self._forwarder.deadly.cut_off(identity, started.replica_id)
        text = f"replica {started.replica_id} was lost in the middle of a stream: {error}"
        if refused:
            logger.error("%s; %s %s is refused from now on", text, identity.method, identity.path)
        elif not moved:
            logger.warning(text)
        if refused or cut is None or cut.said is None:
            return _last_event(
                identity.path, ReplicaUnavailable("the replica that streamed this answer was lost")
            )
        attempts.avoid(started.replica_id)
        try:
            after = await self._forwarder.forward(
                replace(request, body=request.body + cut.said), attempts, self.limits
            )
        except SlipstreamError as failure:
            return _last_event(identity.path, failure)
        if after.whole is not None:
            async with after.connection:
                reason = after.whole[:1000].decode(errors="replace")
            lost = "the replica that streamed this answer was lost, and another one cannot continue it"
            return _last_event(identity.path, ReplicaUnavailable(f"{lost}: {reason}"))
        self._record(REROUTED, reason="continued")
        cut.continues()
        return after


def _last_event(path: str, error: SlipstreamError) -> bytes:
    """An error event. Anthropic's clients skip an unnamed one and take the stream for complete."""
    body, name = error.body(), b""
    if path == "/v1/messages":
        body, name = {"type": "error", **body}, b"event: error\n"
    # The empty line ends a truncated event.
    return b"\n\n" + name + b"data: " + json.dumps(body).encode() + b"\n\n"


def _outgoing(
    request: Request,
    attempts: AttemptHistory,
    path: str,
    body: bytes,
    sequences: int,
    turn: RolloutRequest | None,
) -> Outgoing:
    query = request.scope["query_string"].decode("latin-1")
    forwarded = [(name, value) for name, value in request.headers.items() if name not in NOT_FORWARDED]
    headers = CIMultiDict([*forwarded, ("x-weight-timeout", str(attempts.demand.timeout_s))])
    if turn is not None and headers.get(CONTINUE_HEADER) != "false":
        headers[SAID_NAME] = str(len(body))
        if b'"request_id"' not in body:  # events of all replicas have one id
            headers.setdefault("x-request-id", f"{turn.rollout_ids[0]}-{turn.request}")
    return Outgoing(
        method=request.method,
        target=f"{path}?{query}" if query else path,
        headers=headers,
        body=body,
        sequences=sequences,
        turn=turn,
        identity=RequestIdentity(request.method, path, body),
    )
