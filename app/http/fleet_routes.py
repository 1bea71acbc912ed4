"""State and size of the fleet, versions from a directory."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated

from fastapi import Header, Query, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from app.http.auth import Access
from app.http.prometheus import LOAD, exposition, load_of
from app.http.requests import PublishDirectoryBody, RollbackBody, ScaleBody
from app.http.route import Controller, Directories, Routes, of_app
from deployments.calls.rpc import CallHandle
from deployments.protocol import responses
from deployments.protocol.errors import RoundAborted, SlipstreamError
from deployments.protocol.publishing import RoundReport
from deployments.protocol.routing import MAX_SESSION_ID
from deployments.router.scrape import Scraped, dashboard

EVENTS_WAIT_S = 10.0
Scrape = Callable[[Sequence[str]], Awaitable[Scraped]]  # takes names of metrics; empty: all


class EventStream(StreamingResponse):
    media_type = "text/event-stream"


Scraper = Annotated[Scrape, of_app("scrape")]

routes = Routes()


@routes("GET", "/health", access=Access.OPEN)
async def health(controller: Controller, response: Response) -> responses.Health:
    """200 as soon as one replica serves; 503 before."""
    fleet: responses.Health = await controller.health.remote()
    response.status_code = 200 if fleet.serving else 503
    return fleet


@routes("GET", "/fleet")
async def fleet(controller: Controller) -> responses.FleetStatus:
    """Members, their states and versions, the open round."""
    return await controller.fleet.remote()


@routes("GET", "/fleet/rounds")
async def rounds(
    controller: Controller,
    after: Annotated[int, Query(ge=0, description="only rounds with a greater id")] = 0,
) -> responses.History:
    """Rounds that ended, with their timings."""
    return responses.History(rounds=await controller.rounds.remote(after))


@routes("GET", "/fleet/versions")
async def versions(controller: Controller) -> responses.StoredVersions:
    """The versions in the store."""
    return responses.StoredVersions(versions=await controller.stored_versions.remote())


@routes("GET", "/fleet/load")
async def load(scrape: Scraper) -> responses.FleetLoad:
    """What each replica does now, as its engine counts it."""
    scraped = await scrape(LOAD)
    now = time.time()
    loads = {name: load_of(text) for name, text in scraped.replicas.items() if text is not None}
    replicas = {name: load for name, load in loads.items() if load is not None}
    return responses.FleetLoad(at=now, replicas=replicas, dashboard=await asyncio.to_thread(dashboard))


@routes("GET", "/fleet/events", head=False, response_class=EventStream)
async def events(
    controller: Controller,
    since: Annotated[int, Query(ge=0, description="only events with a greater id")] = 0,
    last_event_id: Annotated[int | None, Header(ge=0, description="instead of `since`")] = None,
) -> EventStream:
    """Server-sent events; `Last-Event-ID` or `?since=N` continues where the client stopped."""
    return EventStream(_events(controller, since if last_event_id is None else last_event_id))


@routes("POST", "/fleet/publish")
async def publish(directories: Directories, body: PublishDirectoryBody) -> RoundReport:
    """Publish a checkpoint directory as the next version, as an ordinary round.

    Progress is in `/fleet`: `round.sent_bytes` of `round.file_bytes`.
    """
    return await directories.publish(body.path, body.label)


@routes("POST", "/fleet/rollback")
async def rollback(
    controller: Controller,
    directories: Directories,
    trainer: Annotated[CallHandle | None, of_app("trainer")],
    body: RollbackBody,
) -> RoundReport:
    """Publish a stored version again, as an ordinary round. The trainer continues from it."""
    try:
        if trainer is None:
            path: str = await controller.rollback_source.remote(body.version)
            return await directories.publish(path, f"rollback to {body.version}")
        return await trainer.rollback.remote(body.version)
    except RoundAborted as error:
        raise type(error)(
            f"the fleet is not rolled back to version {body.version}: {error.message}; roll back again",
            error.detail,
        ) from error


@routes("POST", "/fleet/scale")
async def scale(controller: Controller, body: ScaleBody) -> responses.SizeStatus:
    """Set the number of replicas, or follow the load. Returns before they have started."""
    wanted = None if body.replicas == "auto" else body.replicas
    return await controller.scale.remote(wanted)


@routes("GET", "/liveness", access=Access.OPEN)
async def liveness(controller: Controller) -> responses.Status:
    """200 while the controller responds, even if no replica serves."""
    await controller.fleet.remote()
    return responses.Status(status="alive")


@routes("POST", "/finish_session", access=Access.USER)
async def finish_session(
    session_id: Annotated[str, Query(max_length=MAX_SESSION_ID, description="as in the header x-session-id")],
) -> responses.Status:
    """No-op: a session holds no state."""
    return responses.Status(status="finished")


@routes("GET", "/metrics", response_class=PlainTextResponse)
async def metrics(controller: Controller, scrape: Scraper) -> Response:
    """Metrics of the fleet, and vLLM's of each replica, in Prometheus' text format."""
    fleet: responses.FleetStatus = await controller.fleet.remote()
    rounds: list[RoundReport] = await controller.rounds.remote()
    # Thousands of lines per replica would block the streaming event loop.
    text = await asyncio.to_thread(exposition, fleet, rounds, await scrape(()))
    return PlainTextResponse(text, media_type=CONTENT_TYPE_LATEST)


async def _events(controller: CallHandle, since: int) -> AsyncIterator[str]:
    yield ": connected\n\n"
    while True:
        try:
            events: list[responses.Event] = await controller.events.remote(since, EVENTS_WAIT_S)
        except (SlipstreamError, RayError, RayServeException):  # controller or client is gone
            return  # the response has begun
        for event in events:
            since = event.event_id
            yield f"id: {since}\nevent: {event.name}\ndata: {json.dumps(event.body())}\n\n"
        if not events:
            yield ": no new events\n\n"  # keeps proxies from closing the connection
