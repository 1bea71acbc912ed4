"""`/train/...`: the trainer deployment over HTTP."""

from typing import Annotated, Any

from fastapi import Query

from app.http.requests import PublishBody, ReportBody, SaveBody, StepBody
from app.http.route import GuardedRoute
from deployments.calls.rpc import CallHandle
from deployments.protocol import responses
from deployments.protocol.errors import InvalidRequest
from deployments.protocol.publishing import RoundReport
from trainers.trajectory_arrays import MEDIA_TYPE


class TrainRoutes:
    """Every route responds 400 if there is no trainer deployment."""

    def __init__(self, trainer: CallHandle | None) -> None:
        self._trainer = trainer

    def routes(self) -> list[GuardedRoute]:
        return [
            GuardedRoute("POST", "/train/step", self.step, large=True, binary=MEDIA_TYPE),
            GuardedRoute("POST", "/train/publish", self.publish, large=True),
            GuardedRoute("POST", "/train/save", self.save, large=True),
            GuardedRoute("GET", "/train/status", self.status),
            GuardedRoute("GET", "/train/steps", self.steps),
            GuardedRoute("POST", "/train/report", self.report),
        ]

    async def step(
        self,
        body: StepBody,
        done: Annotated[
            int | None, Query(description="learn only if the trainer has done so many optimizer steps")
        ] = None,
    ) -> responses.StepMetrics:
        """One optimizer step on a batch of trajectories; answers its metrics.

        The arrays of `application/x-safetensors` are those of `trainers/trajectory_arrays.py`.
        """
        return await self._handle().step.remote(body.trajectories, body.settings, done)

    async def publish(self, body: PublishBody) -> RoundReport | responses.AdapterReport:
        """Publish the trainer's weights; returns the round's report.

        For an adapter this is the next version of its name; the response has name and version.
        """
        return await self._handle().publish.remote(body.label, body.step, body.after)

    async def save(self, body: SaveBody) -> responses.SavedCheckpoint:
        """Write a Hugging Face checkpoint, or an adapter's files as peft does."""
        return await self._handle().save.remote(body.path)

    async def status(self) -> responses.TrainerStatus:
        """Optimizer steps done, the last published version, and the current activity."""
        return await self._handle().status.remote()

    async def steps(
        self, after: Annotated[float, Query(ge=0, description="only what was entered after this time")] = 0.0
    ) -> responses.StepLog:
        """The trainer's steps and those that jobs reported, since the trainer started."""
        return await self._handle().steps.remote(after)

    async def report(self, body: ReportBody) -> responses.Status:
        """A job's step, for the page: figures and some rollouts."""
        samples = [
            responses.RolloutSample(text=each.text, reward=each.reward, versions=each.versions)
            for each in body.rollouts
        ]
        entry = responses.StepEntry(run=body.run, step=body.step, values=body.values, rollouts=samples)
        await self._handle().report.remote(entry)
        return responses.Status(status="reported")

    def _handle(self) -> Any:
        if self._trainer is None:
            raise InvalidRequest("this fleet has no trainer deployment: set `trainer` in its configuration")
        return self._trainer
