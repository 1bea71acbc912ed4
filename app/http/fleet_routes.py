"""`/health`, `/fleet...`, `/metrics`: what the fleet is doing, and going back to an older version."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from app.http.bodies import field, json_object
from app.http.metrics import exposition
from deployments.errors import InvalidRequest

EVENTS_WAIT_S = 10.0
MAX_BODY_BYTES = 1 << 20

Table = list[tuple[str, str, Callable[[Request], Awaitable[Response]]]]


class FleetRoutes:
    def __init__(self, controller: DeploymentHandle, trainer: DeploymentHandle | None) -> None:
        self._controller = controller
        self._trainer = trainer

    def table(self) -> Table:
        return [
            ("GET", "/health", self.health),
            ("GET", "/fleet", self.fleet),
            ("GET", "/fleet/rounds", self.rounds),
            ("GET", "/fleet/events", self.events),
            ("POST", "/fleet/rollback", self.rollback),
            ("GET", "/metrics", self.metrics),
        ]

    async def health(self, request: Request) -> Response:
        """200 as soon as one replica serves; 503 before."""
        fleet = await self._controller.fleet.remote()
        serving = sum(member["state"] == "serving" for member in fleet["members"])
        return JSONResponse(
            {
                "status": "ok" if serving else "starting",
                "serving": serving,
                "members": len(fleet["members"]),
                "weight_version": fleet["committed_version"],
            },
            status_code=200 if serving else 503,
        )

    async def fleet(self, request: Request) -> Response:
        return JSONResponse(await self._controller.fleet.remote())

    async def rounds(self, request: Request) -> Response:
        return JSONResponse({"rounds": [asdict(each) for each in await self._controller.rounds.remote()]})

    async def events(self, request: Request) -> Response:
        """Server-sent events; `Last-Event-ID` or `?since=N` goes on where the client left off."""
        text = request.headers.get("last-event-id", request.query_params.get("since", "0"))
        if not text.isdigit():
            raise InvalidRequest(f"since must be the number of an event, got {text!r}")
        return StreamingResponse(self._events(int(text)), media_type="text/event-stream")

    async def rollback(self, request: Request) -> Response:
        """Publish a stored version again, as an ordinary round; body `{"version": N}`."""
        version = field(await json_object(request, MAX_BODY_BYTES), "version", int)
        if self._trainer is None:
            raise InvalidRequest("rolling back needs the trainer deployment, and the fleet has none")
        return JSONResponse(await self._trainer.rollback.remote(version))

    async def metrics(self, request: Request) -> Response:
        fleet = await self._controller.fleet.remote()
        rounds = [asdict(each) for each in await self._controller.rounds.remote()]
        return PlainTextResponse(exposition(fleet, rounds), media_type=CONTENT_TYPE_LATEST)

    async def _events(self, since: int) -> AsyncIterator[str]:
        yield ": connected\n\n"
        while True:
            events: list[dict[str, Any]] = await self._controller.events.remote(since, EVENTS_WAIT_S)
            for event in events:
                since = event["id"]
                yield f"id: {since}\nevent: {event['event']}\ndata: {json.dumps(event)}\n\n"
            if not events:
                yield ": nothing new\n\n"  # keeps proxies from closing the connection
