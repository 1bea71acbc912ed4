"""`/train/...`: the trainer deployment over HTTP. Without one every route responds 400."""

from typing import Annotated

from fastapi import Query

from app.http.requests import PublishBody, ReportBody, SaveBody, StepBody
from app.http.route import Routes, Trainer
from deployments.protocol import responses
from deployments.protocol.publishing import RoundReport
from trainers.trajectory_arrays import MEDIA_TYPE

routes = Routes()


@routes("POST", "/train/step", large=True, binary=MEDIA_TYPE)
async def step(
    trainer: Trainer,
    body: StepBody,
    done: Annotated[
        int | None, Query(description="learn only if the trainer has done so many optimizer steps")
    ] = None,
    label: Annotated[
        str | None,
        Query(
            description="a name of the step, under which it is published: the same call again learns nothing"
        ),
    ] = None,
) -> responses.StepMetrics:
    """One optimizer step on a batch of trajectories; answers its metrics.

    The arrays of `application/x-safetensors` are those of `trainers/trajectory_arrays.py`.
    """
    return await trainer.step.remote(body.trajectories, body.settings, done, label)


@routes("POST", "/train/publish", large=True)
async def publish(trainer: Trainer, body: PublishBody) -> RoundReport | responses.AdapterReport:
    """Publish the trainer's weights; returns the round's report.

    For an adapter this is the next version of its name; the response has name and version.
    """
    return await trainer.publish.remote(body.label, body.step, body.after)


@routes("POST", "/train/save", large=True)
async def save(trainer: Trainer, body: SaveBody) -> responses.SavedCheckpoint:
    """Write a Hugging Face checkpoint, or an adapter's files as peft does."""
    return await trainer.save.remote(body.path)


@routes("GET", "/train/status")
async def status(trainer: Trainer) -> responses.TrainerStatus:
    """Optimizer steps done, the last published version, and the current activity."""
    return await trainer.status.remote()


@routes("GET", "/train/steps")
async def steps(
    trainer: Trainer,
    after: Annotated[float, Query(ge=0, description="only what was entered after this time")] = 0.0,
) -> responses.StepLog:
    """The trainer's steps and those that jobs reported, since the trainer started."""
    return await trainer.steps.remote(after)


@routes("POST", "/train/report")
async def report(trainer: Trainer, body: ReportBody) -> responses.Status:
    """A job's step, for the page: figures and some rollouts."""
    samples = [
        responses.RolloutSample(text=each.text, reward=each.reward, versions=each.versions)
        for each in body.rollouts
    ]
    entry = responses.StepEntry(run=body.run, step=body.step, values=body.values, rollouts=samples)
    await trainer.report.remote(entry)
    return responses.Status(status="reported")
