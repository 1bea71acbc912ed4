"""Sends a list of prompts in parts to several replicas, and merges their responses.

    request ─┬─ part ─► Forwarder ─► replica ─┐
             ├─ part ─► Forwarder ─► replica ─┼─► one response
             └─ part ─► Forwarder ─► replica ─┘

Each part is retried alone. A part's client error is the response to the whole. Leaving early aborts all.
"""

import asyncio
from collections.abc import Sequence

from starlette.responses import Response

from deployments.protocol.rollouts import SAID_HEADER
from deployments.router.forwarding import AttemptHistory, Forwarder, Outgoing, RouterLimits, StartedResponse
from deployments.router.http_client import Headers, ResponseLost
from deployments.router.prompt_lists import merge_responses

NOT_RETURNED = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server", SAID_HEADER}
)


class _Refused(Exception):
    def __init__(self, response: Response) -> None:
        super().__init__(response.status_code)
        self.response = response


async def respond_in_parts(
    forwarder: Forwarder, requests: Sequence[tuple[Outgoing, AttemptHistory]], limits: RouterLimits
) -> Response:
    """In list order, or one part's error response.

    Raises:
        FleetUnavailable: no replica responded to a part in time.
        DeadlyRequest: replicas were lost under a part.
    """
    try:
        async with asyncio.TaskGroup() as group:
            parts = [group.create_task(_part(forwarder, *each, limits)) for each in requests]
    except BaseExceptionGroup as errors:
        error = errors.exceptions[0]
        if isinstance(error, _Refused):
            return error.response
        raise error from None
    bodies, headers = zip(*(part.result() for part in parts), strict=True)
    body = merge_responses(bodies)
    response = Response(body)
    response.raw_headers = [*_merged_headers(headers), (b"content-length", str(len(body)).encode())]
    return response


def returned_headers(started: StartedResponse) -> Headers:
    return [(name, value) for name, value in started.response.headers if name not in NOT_RETURNED]


def response_of(body: bytes, started: StartedResponse) -> Response:
    response = Response(body, started.response.status)
    response.raw_headers = returned_headers(started)
    return response


async def _part(
    forwarder: Forwarder, request: Outgoing, attempts: AttemptHistory, limits: RouterLimits
) -> tuple[bytes, Headers]:
    while True:
        started = await forwarder.forward(request, attempts, limits)
        async with started.connection:
            try:
                body = await started.body()
            except ResponseLost as error:
                forwarder.count_loss(request, attempts, started.replica_id, str(error))
                continue
        if started.response.status >= 400 or started.whole is None:
            raise _Refused(response_of(body, started))
        return body, returned_headers(started)


def _merged_headers(of_parts: Sequence[Headers]) -> Headers:
    named = [dict(headers) for headers in of_parts]
    replicas = dict.fromkeys(each[b"x-slipstream-replica"] for each in named)
    oldest = min(int(each[b"x-weight-version"]) for each in named)
    merged = {
        b"content-length": b"",
        b"x-slipstream-replica": b", ".join(replicas),
        b"x-weight-version": str(oldest).encode(),
    }
    headers = [(name, merged.get(name, value)) for name, value in of_parts[0]]
    return [(name, value) for name, value in headers if value]
