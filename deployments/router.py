"""The fleet's front: passes HTTP through to a replica, and streams the answer back.

A request that no byte was answered to yet moves on to another replica when its own fails, so an
update, a fence or a crash is not the client's business. Nothing is retried after the first byte.
"""

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace

from ray.exceptions import RayActorError, RayError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from deployments.asgi import HttpAnswer, HttpRequest
from deployments.errors import (
    FleetUnavailable,
    InvalidRequest,
    PayloadTooLarge,
    ReplicaUnavailable,
    SlipstreamError,
)
from deployments.routing import Demand

HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"host"})
RETRY_PAUSE_S = 0.05
logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    """Attributes: see `RouterConfig`; all of one router replica."""

    max_in_flight: int
    max_body_bytes: int
    retry_after_s: float
    find_replica_timeout_s: float  # how long a request waits for a replica that may answer it
    weight_timeout_s: float  # how long it waits for a version, without x-weight-timeout


class Router:
    """Forwards requests to the rollout replicas."""

    def __init__(self, rollout: DeploymentHandle, limits: RouterLimits) -> None:
        self._rollout = rollout.options(method_name="http", stream=True)
        self._limits = limits
        self.in_flight = 0

    async def forward(self, request: Request) -> Response:
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
            inner = HttpRequest(
                method=request.method,
                path=request.scope["path"].removeprefix(request.scope.get("root_path", "")),  # Serve's prefix
                query=request.url.query.encode(),
                headers=[(k, v) for k, v in request.headers.raw if k not in HOP_BY_HOP],
                body=await read_body(request, self._limits.max_body_bytes),
            )
            answer, rest = await self._answer(
                inner, demand_of(request.headers, self._limits.weight_timeout_s)
            )
        except BaseException:  # a cancelled request gives its place back too
            self.in_flight -= 1
            raise
        if not answer.streaming:
            self.in_flight -= 1
            await rest.aclose()
            return _response(answer)
        response = StreamingResponse(self._stream(rest), status_code=answer.status)
        response.raw_headers = [(k, v) for k, v in answer.headers if k != b"content-length"]
        return response

    async def _answer(self, request: HttpRequest, demand: Demand) -> tuple[HttpAnswer, "ReplicaStream"]:
        """The first message of a replica's answer; tries replica after replica."""
        deadline = time.monotonic() + self._limits.find_replica_timeout_s
        reason = "no replica is ready"
        while True:
            stream = ReplicaStream(self._rollout.remote(request, demand))
            try:
                first = await anext(stream)
                assert isinstance(first, HttpAnswer)
                return first, stream
            except ReplicaUnavailable as error:
                reason = error.message
                refused = error.detail.get("replica")
                if isinstance(refused, str):
                    demand = replace(demand, excluded=(*demand.excluded[-7:], refused))
            except SlipstreamError:
                raise
            except (BackPressureError, DeploymentUnavailableError, RayActorError) as error:
                reason = _first_line(error)
            except RayError as error:
                if isinstance(error, TaskCancelledError | RequestCancelledError):
                    raise
                reason = _first_line(error)
            if time.monotonic() > deadline:
                raise FleetUnavailable(
                    f"no replica could answer within {self._limits.find_replica_timeout_s:g} s: {reason}",
                    {"retry_after_s": self._limits.retry_after_s},
                )
            await asyncio.sleep(RETRY_PAUSE_S)
            if len(demand.excluded) > 1:  # all of a small fleet has refused once: ask again
                demand = replace(demand, excluded=demand.excluded[-1:])

    async def _stream(self, rest: "ReplicaStream") -> AsyncIterator[bytes]:
        try:
            async with aclosing(rest):
                async for piece in rest:
                    assert isinstance(piece, bytes)
                    yield piece
        except (RayError, ReplicaUnavailable) as error:
            logger.warning("a replica was lost in the middle of a stream: %s", _first_line(error))
            lost = ReplicaUnavailable("the replica that streamed this answer was lost")
            yield b"data: " + json.dumps(lost.body()).encode() + b"\n\n"
        finally:
            self.in_flight -= 1


class ReplicaStream:
    """A replica's answer, message by message; closing it early ends the request in the engine."""

    def __init__(self, generator: DeploymentResponseGenerator[HttpAnswer | bytes]) -> None:
        self._generator = generator
        self._ended = False

    def __aiter__(self) -> "ReplicaStream":
        return self

    async def __anext__(self) -> HttpAnswer | bytes:
        try:
            return await anext(self._generator)
        except asyncio.CancelledError:
            self._generator.cancel()
            raise
        except BaseException:  # its end, or an error: either way there is nothing left to cancel
            self._ended = True
            raise

    async def aclose(self) -> None:
        if not self._ended:
            self._ended = True
            self._generator.cancel()


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


def demand_of(headers: Mapping[str, str], weight_timeout_s: float) -> Demand:
    """What the request's headers ask of the weights.

    Raises:
        InvalidRequest: a header is not a number in its range.
    """
    return Demand(
        min_version=int(_number(headers, "x-min-weight-version", 0)),
        timeout_s=_number(headers, "x-weight-timeout", weight_timeout_s),
        session_id=headers.get("x-session-id"),
    )


def _number(headers: Mapping[str, str], name: str, default: float) -> float:
    text = headers.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or (name == "x-min-weight-version" and not value.is_integer()):
        raise InvalidRequest(f"{name} must be a number of at least 0, got {text!r}")
    return value


def _response(answer: HttpAnswer) -> Response:
    response = Response(content=answer.body, status_code=answer.status)
    response.raw_headers = list(answer.headers)
    return response


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
