"""Sends a list of prompts to several replicas, a part to each, and merges their responses.

    request ─┬─ part ─► Forwarder ─► replica ─┐
             ├─ part ─► Forwarder ─► replica ─┼─► one response, or one stream
             └─ part ─► Forwarder ─► replica ─┘

A part is retried until the client has some of it. The merged response begins once all parts have, so that a
client error of one part becomes the response. Leaving early aborts all parts.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.responses import Response, StreamingResponse

from deployments.host.logs import serve_logger
from deployments.protocol.errors import ReplicaUnavailable, SlipstreamError
from deployments.router.forwarding import AttemptHistory, Forwarder, Outgoing, RouterLimits, StartedResponse
from deployments.router.http_client import Headers, ResponseLost
from deployments.router.prompt_lists import MergedStream, PartFailed, is_stop, merge_responses

NOT_RETURNED = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server"})
MAX_WAITING_EVENTS = 256  # per part, not yet taken by the client
logger = serve_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRequest:
    request: Outgoing
    attempts: AttemptHistory


@asynccontextmanager
async def respond_in_parts(
    forwarder: Forwarder, requests: Sequence[PartRequest], limits: RouterLimits, *, streams: bool
) -> AsyncIterator[Response]:
    """The merged response, in the order of the list, or the error response to one part.

    Raises:
        FleetUnavailable: no replica responded to a part in time.
        DeadlyRequest: replicas were lost under a part.
    """
    news = asyncio.Event()
    parts = [_Part(forwarder, each, limits, news, streams=streams) for each in requests]
    running = [asyncio.create_task(part.run()) for part in parts]
    try:
        try:
            await _until_begun(parts, news)
            response = _merged_response(parts, news, streams=streams)
        except _Refused as refused:
            response = refused.response
        yield response
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def returned_headers(started: StartedResponse) -> Headers:
    return [(name, value) for name, value in started.response.headers if name not in NOT_RETURNED]


def response_of(body: bytes, started: StartedResponse) -> Response:
    response = Response(body, started.response.status)
    response.raw_headers = returned_headers(started)
    return response


class _Refused(Exception):
    """A replica rejected a part; its error is the response to the whole request."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status_code)
        self.response = response


class _Stopped(Exception):
    """A replica shut down gracefully before the client had anything of its part."""


class _Part:
    """Reads the response to one part ahead of the client; sets `news`."""

    def __init__(
        self,
        forwarder: Forwarder,
        request: PartRequest,
        limits: RouterLimits,
        news: asyncio.Event,
        *,
        streams: bool,
    ) -> None:
        self._forwarder = forwarder
        self._request, self._attempts = request.request, request.attempts
        self._limits = limits
        self._news = news
        self._streams = streams
        self._space = asyncio.Event()
        self.headers: Headers = []
        self.waiting: deque[bytes] = deque()  # events, or the whole response
        self.taken = False  # the client has some of it
        self.all_begun = False  # all other parts have begun too
        self.ended = False
        self.failure: Exception | None = None

    @property
    def begun(self) -> bool:
        return bool(self.waiting) or self.ended

    async def run(self) -> None:
        try:
            while not self.ended:
                started = await self._forwarder.forward(self._request, self._attempts, self._limits)
                async with started.connection:
                    await self._read(started)
        except Exception as error:  # broad: reported to the client by the merger
            self.failure = error
        finally:
            self._news.set()

    def take(self) -> bytes:
        self.taken = True
        self._space.set()
        return self.waiting.popleft()

    async def _read(self, started: StartedResponse) -> None:
        try:
            if started.response.status >= 400 or (started.whole is not None) == self._streams:
                raise _Refused(response_of(await started.body(), started))
            self.headers = returned_headers(started)
            if self._streams:
                await self._read_events(started)
            else:
                self.waiting.append(await started.body())
            self.ended = True
        except _Stopped:
            self.waiting.clear()
            self._attempts.avoid(started.replica_id)
        except ResponseLost as error:
            if self.taken:
                self._forwarder.deadly.cut_off(self._request.identity, started.replica_id)
                raise
            self.waiting.clear()
            self._forwarder.count_loss(self._request, self._attempts, started.replica_id, str(error))

    async def _read_events(self, started: StartedResponse) -> None:
        rest = b""
        while piece := await started.response.piece():
            *events, rest = (rest + piece).split(b"\n\n")
            if not self.taken and any(map(is_stop, events)):
                raise _Stopped
            self.waiting.extend(events)
            self._news.set()
            while self.all_begun and len(self.waiting) > MAX_WAITING_EVENTS:
                self._space.clear()
                await self._space.wait()


async def _until_begun(parts: Sequence[_Part], news: asyncio.Event) -> None:
    """A response that is not streamed begins when it is complete."""
    while not all(part.begun for part in parts):
        await news.wait()
        news.clear()
        for part in parts:
            if part.failure is not None:
                raise part.failure
    for part in parts:
        part.all_begun = True


def _merged_response(parts: Sequence[_Part], news: asyncio.Event, *, streams: bool) -> Response:
    response: Response
    if streams:
        response = StreamingResponse(_merged_events(parts, news))
        headers = _merged_headers(parts)
    else:
        body = merge_responses([part.take() for part in parts])
        response = Response(body)
        headers = [*_merged_headers(parts), (b"content-length", str(len(body)).encode())]
    response.raw_headers = headers
    return response


def _merged_headers(parts: Sequence[_Part]) -> Headers:
    """Headers of the first part, with all replicas and the oldest version."""
    of_parts = [dict(part.headers) for part in parts]
    replicas = dict.fromkeys(each[b"x-slipstream-replica"] for each in of_parts)
    oldest = min(int(each[b"x-weight-version"]) for each in of_parts)
    merged = {
        b"content-length": b"",
        b"x-slipstream-replica": b", ".join(replicas),
        b"x-weight-version": str(oldest).encode(),
    }
    headers = [(name, merged.get(name, value)) for name, value in parts[0].headers]
    return [(name, value) for name, value in headers if value]


async def _merged_events(parts: Sequence[_Part], news: asyncio.Event) -> AsyncIterator[bytes]:
    merged = MergedStream(len(parts))
    pieces: list[bytes] = []
    try:
        while True:
            news.clear()
            pieces = []
            for index, part in enumerate(parts):
                while part.waiting:
                    pieces.append(merged.add(index, part.take()))
            if pieces:
                yield b"".join(pieces)
                continue
            for part in parts:
                if part.failure is not None:
                    raise part.failure
            if all(part.ended for part in parts):
                yield merged.end()
                return
            await news.wait()
    except PartFailed as failed:
        yield b"".join([*pieces, failed.event, b"\n\ndata: [DONE]\n\n"])
    except (ResponseLost, SlipstreamError, _Refused) as error:
        logger.warning("a part of a stream was lost: %s", error)
        yield b"data: " + _error_body(error) + b"\n\n"


def _error_body(error: Exception) -> bytes:
    if isinstance(error, _Refused):
        return bytes(error.response.body)
    lost = ReplicaUnavailable("the replica that streamed a part of this answer was lost")
    return json.dumps((error if isinstance(error, SlipstreamError) else lost).body()).encode()
