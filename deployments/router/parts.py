"""Answers a list of prompts by several replicas at once, each with a part of it.

    request ─┬─ part ─► Forwarder ─► replica ─┐
             ├─ part ─► Forwarder ─► replica ─┼─► one answer, or one stream
             └─ part ─► Forwarder ─► replica ─┘

Each part is forwarded, and tried again, as a request of its own; it is tried again as long as the client has
nothing of it. The answer begins when all parts have begun, so that what one of them is refused with (an error
of the client's) is the answer to the whole. Whoever leaves this module early ends all parts.
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
from deployments.router.exchange import ExchangeLost, Headers
from deployments.router.forwarding import Begun, Forwarder, Outgoing, Trail
from deployments.router.limits import RouterLimits
from deployments.router.prompt_lists import MergedStream, PartFailed, is_stop, merge_answers

NOT_RETURNED = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server"})
MAX_WAITING_EVENTS = 256  # of one part, that the client has not taken yet
logger = serve_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRequest:
    """A part of a request, and where it has been."""

    request: Outgoing
    trail: Trail


@asynccontextmanager
async def answer_in_parts(
    forwarder: Forwarder, requests: Sequence[PartRequest], limits: RouterLimits, *, streams: bool
) -> AsyncIterator[Response]:
    """The merged answer of all parts, or what one of them was refused with.

    Args:
        requests: in the order of the list of prompts.

    Raises:
        FleetUnavailable: no replica answered a part in time.
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


def returned(begun: Begun) -> Headers:
    """The headers of a replica's answer that the client gets."""
    return [(name, value) for name, value in begun.answer.headers if name not in NOT_RETURNED]


class _Refused(Exception):
    """A replica has answered a part with an error, which is the answer to the whole."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status_code)
        self.response = response


class _Stopped(Exception):
    """A replica was stopped in order while the client had nothing of its part."""


class _Part:
    """One part: it reads the answer of its replica, ahead of the client.

    Args:
        news: set whenever something came.
    """

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
        self._request, self._trail = request.request, request.trail
        self._limits = limits
        self._news = news
        self._streams = streams
        self._room = asyncio.Event()
        self.headers: Headers = []
        self.waiting: deque[bytes] = deque()  # events, or the whole answer
        self.taken = False  # the client has something of it
        self.all_begun = False  # of the other parts too
        self.ended = False
        self.failure: Exception | None = None

    @property
    def begun(self) -> bool:
        return bool(self.waiting) or self.ended

    async def run(self) -> None:
        """Read the answer to its end; a failure is kept for whoever merges."""
        try:
            while not self.ended:
                begun = await self._forwarder.forward(self._request, self._trail, self._limits)
                async with begun.connection:
                    await self._read(begun)
        except Exception as error:  # broad: whatever it is, the client is told by the one who merges
            self.failure = error
        finally:
            self._news.set()

    def take(self) -> bytes:
        """The next event."""
        self.taken = True
        self._room.set()
        return self.waiting.popleft()

    async def _read(self, begun: Begun) -> None:
        try:
            if begun.answer.status >= 400 or (begun.whole is not None) == self._streams:
                response = Response(await begun.body(), begun.answer.status)
                response.raw_headers = returned(begun)
                raise _Refused(response)
            self.headers = returned(begun)
            if self._streams:
                await self._read_events(begun)
            else:
                self.waiting.append(await begun.body())
            self.ended = True
        except _Stopped:
            self.waiting.clear()
            self._trail.refused(begun.replica_id)
        except ExchangeLost as error:
            if self.taken:
                self._forwarder.deadly.cut_off(self._request.identity, begun.replica_id)
                raise
            self.waiting.clear()
            self._forwarder.count_loss(self._request, self._trail, begun.replica_id, str(error))

    async def _read_events(self, begun: Begun) -> None:
        rest = b""
        while piece := await begun.answer.piece():
            *events, rest = (rest + piece).split(b"\n\n")
            if not self.taken and any(map(is_stop, events)):
                raise _Stopped
            self.waiting.extend(events)
            self._news.set()
            while self.all_begun and len(self.waiting) > MAX_WAITING_EVENTS:
                self._room.clear()
                await self._room.wait()


async def _until_begun(parts: Sequence[_Part], news: asyncio.Event) -> None:
    """Until each part has begun; a whole answer has begun when it has ended."""
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
        body = merge_answers([part.take() for part in parts])
        response = Response(body)
        headers = [*_merged_headers(parts), (b"content-length", str(len(body)).encode())]
    response.raw_headers = headers
    return response


def _merged_headers(parts: Sequence[_Part]) -> Headers:
    """Those of the first part, all replicas, and the oldest version."""
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
    except (ExchangeLost, SlipstreamError, _Refused) as error:
        logger.warning("a part of a stream was lost: %s", error)
        yield b"data: " + _error_body(error) + b"\n\n"


def _error_body(error: Exception) -> bytes:
    if isinstance(error, _Refused):
        return bytes(error.response.body)
    lost = ReplicaUnavailable("the replica that streamed a part of this answer was lost")
    return json.dumps((error if isinstance(error, SlipstreamError) else lost).body()).encode()
