"""The replica's HTTP server, for routers and other replicas only.

Bytes do not pass through Ray: each streamed token would cost two actor messages, 1 ms of CPU time. Routers
get its address and key from the replica's metadata.
"""

import asyncio
import hmac
import json
import secrets
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Send

from deployments.host import tracing
from deployments.protocol.errors import Conflict, InvalidRequest, ReplicaUnavailable, SlipstreamError
from deployments.protocol.passed_routes import require_passed
from deployments.protocol.rollouts import MOVED, SAID_HEADER, TURN_HEADER, framed, turn_of
from deployments.protocol.routing import (
    ERROR_EVENTS,
    KEY_HEADER,
    LOST,
    NOT_BEGUN,
    PART_HEADER,
    REFUSED_HEADER,
    ROUTER_HEADER,
    Demand,
    Part,
    demand_of,
    part_of,
    router_of,
)
from deployments.replica.capture import Capture, Ledger
from deployments.replica.continuation import Said
from deployments.replica.spans import RECORDER, SpanRecorder, annotate_events, annotate_json
from deployments.weights.store.version_fetcher import VERSIONS


class ClientDisconnected(Exception):
    pass


async def while_connected(ready: Awaitable[None], receive: Receive) -> Receive:
    """Await `ready` until the client disconnects, which uvicorn reports only to a reader of the body. Returns
    a `receive` that replays the body; raises ClientDisconnected."""
    messages: deque[Message] = deque()

    async def replay() -> Message:
        return messages.popleft() if messages else await receive()

    try:
        async with asyncio.timeout(None) as limit:
            listening = asyncio.create_task(_listen(receive, messages, lambda: limit.reschedule(0)))
            try:
                await ready
            finally:
                listening.cancel()
    except TimeoutError:
        if limit.expired():
            raise ClientDisconnected from None
        raise
    return replay


async def _listen(receive: Receive, messages: deque[Message], disconnected: Callable[[], None]) -> None:
    while not messages or messages[-1]["type"] != "http.disconnect":
        messages.append(await receive())
    disconnected()


async def split_body(receive: Receive, own_bytes: int) -> tuple[Receive, bytes]:
    """Returns a `receive` with the body's first `own_bytes`, and the rest. Raises ClientDisconnected."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        body += message.get("body", b"")
        more = message.get("more_body", False)
    own = deque([{"type": "http.request", "body": bytes(body[:own_bytes]), "more_body": False}])

    async def replay() -> Message:
        return own.popleft() if own else await receive()

    return replay, bytes(body[own_bytes:])


METRICS = ("/metrics", "/metrics/")  # vLLM's; the router merges those of all replicas, or selects some

App = Callable[[Message, Receive, Send], Awaitable[None]]


class ReplicaFront:
    """An ASGI application around vLLM's: admission, versions and refusals.

    Args:
        admit: returns when a request with this demand may be answered; raises SlipstreamError.
        refusal: why no request may be answered now; None if it may.
        rollouts: calls the ledger of rollouts; None: nothing is captured.
        versions: serves the files of this host's versions to other replicas; None: hosts share a store.
        require_passed: raises SlipstreamError for a method and path that routers must not pass.
    """

    def __init__(
        self,
        app: App,
        *,
        replica_id: str,
        admit: Callable[[Demand], Awaitable[None]],
        refusal: Callable[[], str | None],
        version: Callable[[], int],
        rollouts: Ledger | None = None,
        versions: App | None = None,
        require_passed: Callable[[str, str], None] = require_passed,
    ) -> None:
        self._app = app
        self._require_passed = require_passed
        self._rollouts = rollouts
        self._versions = versions
        self.replica_id = replica_id
        self._admit = admit
        self._refusal = refusal
        self._version = version
        self.key = secrets.token_hex(16)
        self._stopped = self.in_order = False
        self._running: dict[asyncio.Task[Any], _Response | None] = {}  # None: not admitted yet
        self._load: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        return len(self._running)

    @property
    def load(self) -> dict[str, int]:
        return {router: load for router, load in self._load.items() if load}

    def stop(self, *, in_order: bool) -> None:
        """Refuse requests whose response has not started; another replica takes them. `in_order`: a graceful
        shutdown; else the replica failed, possibly because of one of them."""
        self._stopped, self.in_order = True, in_order
        for task, answer in self._running.items():
            if answer is None or not answer.begun:
                task.cancel()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"  # the server has no websockets
        headers = dict(scope["headers"])
        if not hmac.compare_digest(headers.get(KEY_HEADER, b""), self.key.encode()):
            return await _send_error(send, InvalidRequest("this port is for the fleet's own processes"))
        if scope["method"] == "GET" and scope["path"] in METRICS:
            return await self._app(scope, receive, send)  # served in every state; not a client's request
        if self._versions is not None and scope["path"].startswith(VERSIONS):
            return await self._versions(scope, receive, send)
        task = asyncio.current_task()
        assert task is not None
        answer: _Response | None = None
        self._running[task] = answer
        router, load = router_of(headers.get(ROUTER_HEADER))
        self._load[router] += load
        try:
            self._require_passed(scope["method"], scope["path"])
            demand = demand_of({name.decode(): text.decode("latin-1") for name, text in headers.items()}, 0)
            if demand.min_version > self._version():
                receive = await while_connected(self._admit(demand), receive)
            else:
                await self._admit(demand)
            recorder, part = SpanRecorder(self._version()), part_of(headers.get(PART_HEADER))
            turn = turn_of(headers.get(TURN_HEADER))
            if turn is not None and self._rollouts is not None:
                said = None
                if (own_bytes := headers.get(SAID_HEADER)) is not None:
                    receive, received = await split_body(receive, int(own_bytes))
                    said = Said(received)
                recorder.capture = Capture(turn, self._rollouts, said)
            answer = _Response(self, send, recorder, part)
            self._running[task] = answer
            with tracing.span("replica", tracing.received(headers), replica=self.replica_id):
                if tracing.ENABLED:  # vLLM's span is a child of this one
                    sent = {name.encode(): text.encode() for name, text in tracing.headers().items()}
                    scope = {**scope, "headers": [*(headers | sent).items()]}
                await answer.run(self._app, scope, receive)
        except SlipstreamError as error:
            await _send_error(send, error, self._refusal_of(answer))
        except ClientDisconnected:
            pass
        except asyncio.CancelledError:
            if not self._stopped or (answer is not None and answer.begun):
                raise
            stopped = ReplicaUnavailable(f"replica {self.replica_id}: shutting down")
            await _send_error(send, self.refused() or stopped, self._refusal_of(answer))
        finally:
            del self._running[task]
            self._load[router] -= load

    def _refusal_of(self, answer: "_Response | None") -> bytes:
        return NOT_BEGUN if answer is None or self.in_order else LOST

    def refused(self) -> ReplicaUnavailable | None:
        reason = self._refusal()
        return None if reason is None else ReplicaUnavailable(f"replica {self.replica_id}: {reason}")


class _EngineLost(Exception):
    """The engine died in the middle of a stream; the closed connection tells the router."""


class _Response:
    """Adds versions; becomes a refusal if the engine failed before its first byte."""

    def __init__(self, front: ReplicaFront, send: Send, recorder: SpanRecorder, part: Part | None) -> None:
        self._front = front
        self._send = send
        self._recorder = recorder
        self._part = part
        self._start: Message | None = None  # held back until the first piece of the body
        self.begun = False
        self._is_json = self._is_stream = self._is_named = False  # named events, as on /v1/messages
        self._replacement: SlipstreamError | None = None
        self._body = bytearray()

    async def run(self, app: App, scope: Message, receive: Receive) -> None:
        RECORDER.set(self._recorder)
        try:
            await app(scope, receive, self._on_message)
        except Exception as error:  # another replica may be intact
            if self.begun:
                await self._cut_off(error)
                return
            refusal = ReplicaUnavailable(f"replica {self._front.replica_id} failed: {error}")
            raise self._failure or self._replacement or self._front.refused() or refusal from error
        finally:
            self._recorder.end()
            if self._recorder.capture is not None:
                self._recorder.capture.close()
        if self._replacement is not None:
            raise self._replacement

    @property
    def _failure(self) -> SlipstreamError | None:
        return None if self._recorder.capture is None else self._recorder.capture.failure

    @property
    def _said(self) -> Said | None:
        capture = self._recorder.capture if self._is_stream else None
        return None if capture is None else capture.said

    def _error_event(self, error: SlipstreamError) -> bytes:
        name, kind = (b"event: error\n", {"type": "error"}) if self._is_named else (b"", {})
        return name + b"data: " + json.dumps(kind | error.body()).encode() + b"\n\n"

    async def _cut_off(self, error: Exception) -> None:
        """In a graceful shutdown end a stream with an error event; else raise: the connection is closed."""
        refused = self._failure
        if refused is None and self._front.in_order:
            refused = self._front.refused()
        refused = refused if self._is_stream else None
        if refused is not None and self._failure is None and self._said is not None:
            moved = {"type": "http.response.body", "body": framed(MOVED, b""), "more_body": True}
            await self._send(moved)
            refused = None
        if refused is None:
            raise error
        body = self._error_event(refused)
        if self._said is not None:
            body = framed(b"", body)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _on_message(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if message["status"] >= 400:
                self._replacement = self._failure
            if message["status"] >= 500 and self._replacement is None:  # vLLM's when its engine is dead
                self._replacement = self._front.refused()
            self._start = message
            content_type = Headers(raw=message["headers"]).get("content-type", "")
            self._is_json = content_type.startswith("application/json")
            self._is_stream = content_type.startswith("text/event-stream")
            return
        if self._replacement is not None:
            return
        piece, more = message.get("body", b""), message.get("more_body", False)
        if self._is_json:
            self._body += piece
            if more:
                return
            assert self._start is not None
            piece = annotate_json(bytes(self._body), self._recorder, self._start["status"], self._part)
        elif self._is_stream:
            if piece.startswith(ERROR_EVENTS) and self._failure is not None:
                if not self.begun:
                    self._replacement = self._failure
                    return
                piece = self._error_event(self._failure)
            elif piece.startswith(ERROR_EVENTS):
                refused = self._front.refused()
                if refused is not None and self.begun:
                    raise _EngineLost(refused.message)
                self._replacement = refused
                if refused is not None:
                    return
            piece = annotate_events(piece, self._recorder)
        if not self.begun:
            if self._recorder.capture is not None:
                await self._recorder.capture.opened()
            self.begun, self._is_named = True, piece.startswith(b"event: ")
            await self._send_start(len(piece) if self._is_json else None)
        if piece and (said := self._said) is not None:
            piece = framed(said.news(), piece)
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})

    async def _send_start(self, length: int | None) -> None:
        assert self._start is not None
        headers = MutableHeaders(raw=list(self._start["headers"]))
        if length is not None:
            headers["content-length"] = str(length)
        headers["x-slipstream-replica"] = self._front.replica_id
        headers["x-weight-version"] = str(self._recorder.version)
        if self._said is not None:
            headers[SAID_HEADER.decode()] = "framed"
        await self._send(
            {"type": "http.response.start", "status": self._start["status"], "headers": headers.raw}
        )


async def _send_error(send: Send, error: SlipstreamError, refusal: bytes = NOT_BEGUN) -> None:
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if isinstance(error, ReplicaUnavailable):
        headers.append((REFUSED_HEADER, refusal))
    if isinstance(error, Conflict):  # OpenAI's client would repeat a 409, and wait for the version again
        headers.append((b"x-should-retry", b"false"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
