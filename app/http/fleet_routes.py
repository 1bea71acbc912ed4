"""`/health`, `/fleet...`, `/metrics`: state and size of the fleet, versions from a directory."""

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
from app.http.directory_publisher import DirectoryPublisher
from app.http.prometheus import LOAD, exposition, load_of
from app.http.requests import PublishDirectoryBody, RollbackBody, ScaleBody
from app.http.route import GuardedRoute
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


class FleetRoutes:
    """`trainer` is None without a trainer deployment."""

    def __init__(
        self,
        controller: CallHandle,
        trainer: CallHandle | None,
        directories: DirectoryPublisher,
        scrape: Scrape,
    ) -> None:
        self._controller = controller
        self._trainer = trainer
        self._directories = directories
        self._scrape = scrape

    def routes(self) -> list[GuardedRoute]:
        return [
            GuardedRoute("GET", "/health", self.health, access=Access.OPEN),
            GuardedRoute("GET", "/fleet", self.fleet),
            GuardedRoute("GET", "/fleet/rounds", self.rounds),
            GuardedRoute("GET", "/fleet/versions", self.versions),
            GuardedRoute("GET", "/fleet/load", self.load),
            GuardedRoute("GET", "/fleet/events", self.events, head=False, response_class=EventStream),
            GuardedRoute("POST", "/fleet/publish", self.publish),
            GuardedRoute("POST", "/fleet/rollback", self.rollback),
            GuardedRoute("POST", "/fleet/scale", self.scale),
            # Routes of prime-rl's and SkyRL's servers.
            GuardedRoute("GET", "/liveness", self.liveness, access=Access.OPEN),
            GuardedRoute("POST", "/finish_session", self.finish_session, access=Access.USER),
            GuardedRoute("GET", "/metrics", self.metrics, response_class=PlainTextResponse),
        ]

    async def health(self, response: Response) -> responses.Health:
        """200 as soon as one replica serves; 503 before."""
        fleet: responses.Health = await self._controller.health.remote()
        response.status_code = 200 if fleet.serving else 503
        return fleet

    async def fleet(self) -> responses.FleetStatus:
        """Members, their states and versions, the open round."""
        return await self._controller.fleet.remote()

    async def rounds(
        self, after: Annotated[int, Query(ge=0, description="only rounds with a greater id")] = 0
    ) -> responses.History:
        """Rounds that ended, with their timings."""
        return responses.History(rounds=await self._controller.rounds.remote(after))

    async def versions(self) -> responses.StoredVersions:
        """The versions in the store."""
        return responses.StoredVersions(versions=await self._controller.stored_versions.remote())

    async def load(self) -> responses.FleetLoad:
        """What each replica does now, as its engine counts it."""
        scraped = await self._scrape(LOAD)
        now = time.time()
        loads = {name: load_of(text) for name, text in scraped.replicas.items() if text is not None}
        replicas = {name: load for name, load in loads.items() if load is not None}
        return responses.FleetLoad(at=now, replicas=replicas, dashboard=await asyncio.to_thread(dashboard))

    async def events(
        self,
        since: Annotated[int, Query(ge=0, description="only events with a greater id")] = 0,
        last_event_id: Annotated[int | None, Header(ge=0, description="instead of `since`")] = None,
    ) -> EventStream:
        """Server-sent events; `Last-Event-ID` or `?since=N` continues where the client stopped."""
        return EventStream(self._events(since if last_event_id is None else last_event_id))

    async def publish(self, body: PublishDirectoryBody) -> RoundReport:
        """Publish a checkpoint directory as the next version, as an ordinary round.

        Progress is in `/fleet`: `round.sent_bytes` of `round.file_bytes`.
        """
        return await self._directories.publish(body.path, body.label)

    async def rollback(self, body: RollbackBody) -> RoundReport:
        """Publish a stored version again, as an ordinary round. The trainer continues from it."""
        try:
            if self._trainer is None:
                path: str = await self._controller.rollback_source.remote(body.version)
                return await self._directories.publish(path, f"rollback to {body.version}")
            return await self._trainer.rollback.remote(body.version)
        except RoundAborted as error:
            raise type(error)(
                f"the fleet is not rolled back to version {body.version}: {error.message}; roll back again",
                error.detail,
            ) from error

    async def scale(self, body: ScaleBody) -> responses.SizeStatus:
        """Set the number of replicas, or follow the load. Returns before they have started."""
        wanted = None if body.replicas == "auto" else body.replicas
        return await self._controller.scale.remote(wanted)

    async def liveness(self) -> responses.Status:
        """200 while the controller responds, even if no replica serves."""
        await self._controller.fleet.remote()
        return responses.Status(status="alive")

    async def finish_session(
        self,
        session_id: Annotated[
            str, Query(max_length=MAX_SESSION_ID, description="as in the header x-session-id")
        ],
    ) -> responses.Status:
        """No-op: a session holds no state."""
        return responses.Status(status="finished")

    async def metrics(
        self,
        with_serve: Annotated[
            bool, Query(alias="all", description="Serve's metrics too, a megabyte")
        ] = False,
    ) -> Response:
        """Metrics of the fleet, and vLLM's of each replica, in Prometheus' text format."""
        fleet: responses.FleetStatus = await self._controller.fleet.remote()
        rounds: list[RoundReport] = await self._controller.rounds.remote()
        # Thousands of lines per replica would block the event loop, which streams responses.
        text = await asyncio.to_thread(
            exposition, fleet, rounds, await self._scrape(()), with_serve=with_serve
        )
        return PlainTextResponse(text, media_type=CONTENT_TYPE_LATEST)

    async def _events(self, since: int) -> AsyncIterator[str]:
        yield ": connected\n\n"
        while True:
            try:
                events: list[responses.Event] = await self._controller.events.remote(since, EVENTS_WAIT_S)
            except (SlipstreamError, RayError, RayServeException):  # controller or client is gone
                return  # the response has begun
            for event in events:
                since = event.event_id
                yield f"id: {since}\nevent: {event.name}\ndata: {json.dumps(event.body())}\n\n"
            if not events:
                yield ": no new events\n\n"  # keeps proxies from closing the connection
