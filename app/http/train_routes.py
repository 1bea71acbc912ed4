"""`/train/...`: the trainer deployment over HTTP."""

from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.http.bodies import field, json_object
from app.http.fleet_routes import Table
from deployments.errors import InvalidRequest


class TrainRoutes:
    def __init__(self, trainer: DeploymentHandle | None, max_body_bytes: int) -> None:
        self._trainer = trainer
        self._max_body_bytes = max_body_bytes

    def table(self) -> Table:
        return [
            ("POST", "/train/step", self.step),
            ("POST", "/train/publish", self.publish),
            ("POST", "/train/save", self.save),
            ("GET", "/train/status", self.status),
        ]

    async def step(self, request: Request) -> Response:
        """One optimizer step on a batch of trajectories; answers its metrics."""
        body = await json_object(request, self._max_body_bytes)
        field(body, "trajectories", list)
        return JSONResponse(await self._handle().step.remote(body))

    async def publish(self, request: Request) -> Response:
        """Move the fleet to the trainer's weights; answers the round's report. Body: `{"label"?: str}`."""
        body = await json_object(request, self._max_body_bytes)
        return JSONResponse(await self._handle().publish.remote(field(body, "label", str, None)))

    async def save(self, request: Request) -> Response:
        """Write a Hugging Face checkpoint. Body: `{"path"?: str}`."""
        body = await json_object(request, self._max_body_bytes)
        return JSONResponse(await self._handle().save.remote(field(body, "path", str, None)))

    async def status(self, request: Request) -> Response:
        return JSONResponse(await self._handle().status.remote())

    def _handle(self) -> Any:
        if self._trainer is None:
            raise InvalidRequest("this fleet has no trainer deployment: set `trainer` in its configuration")
        return self._trainer
