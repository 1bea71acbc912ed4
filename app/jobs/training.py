"""Steps and publishes of the trainer, each done once although its answer may be lost.

trainer dies      Serve starts another one, which resumes from the committed version. A step without its
                  publish is repeated. Without the version it refuses everything, and the job ends.
router, job die   the trainer's status says what was done
round aborted     publish again
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from pydantic import JsonValue

from app.client import calls
from app.client.connection import AsyncFleetClient, FleetError
from app.jobs.metrics import StepRecord
from app.jobs.run import Run
from deployments.protocol.responses import TrainerStatus
from trainers.trajectory import Trajectory

PATIENCE_S = 300.0  # limit of repeated calls: a replica may be replaced
ATTEMPTS = 5
POLL_S = 1.0
BUSY_S = 3600.0  # `step_timeout_s` ends its work before
REFUSED = (400, 413, 422)  # of a batch
REPEATED = ("answer_lost", "other_step", "round_aborted")


class BatchRefused(FleetError):
    """The trainer refuses to learn from a batch, and has not."""


async def train(
    run: Run, batch: Sequence[Trajectory], record: StepRecord, steps: int | None, newer_than: int
) -> StepRecord:
    """The record after a step and its publish, or after what a killed job has made of them.

    Args:
        steps: of the trainer when a job that was killed took this batch, which it may have sent.
        newer_than: the fleet's version when this batch was taken.

    Raises:
        BatchRefused: the trainer refuses the batch.
        FleetError: the fleet refuses, another job makes steps, or something was lost `ATTEMPTS` times.
    """
    client, label = run.policy.client, f"step {record.step}"
    most: int | None = None  # steps that the trainer has done, if all are this run's
    for attempt in range(1, ATTEMPTS + 1):
        began = time.monotonic()
        status = await idle(client)
        if most is not None and status.step > most:
            raise FleetError(
                f"{label}: expected a trainer after step {most}, got one after step {status.step}: another "
                "job trains it. End one of them, and continue with --resume"
            )
        try:
            version: int | None = None
            if steps is not None and status.step == steps + 1:
                most = status.step
                # A trainer that was restarted knows no figures of it.
                metrics: dict[str, JsonValue] = {"step": status.step, **status.last_step}
                version = _published(status, label, newer_than)
            else:
                if most is None:  # a killed job may have sent it, and it has not arrived
                    most = status.step + (status.step == steps)
                steps = status.step
                metrics = await step(client, batch, run.step_settings, steps)
                most = steps + 1
            trained = time.monotonic()
            if version is None:
                done = metrics["step"]
                assert isinstance(done, int), "the trainer counts its steps"
                version = (await client.send(calls.publish(label, done))).version
            ended = time.monotonic()
            return replace(
                record, version=version, trainer=metrics, train_s=trained - began, publish_s=ended - trained
            )
        except FleetError as error:
            is_lost = error.status is None or error.type in REPEATED
            if not is_lost or attempt == ATTEMPTS:
                raise
            if error.type != "other_step" and steps is not None:
                most = steps + 1  # it may have been made
            run.say(f"{label}: {error}; asking the trainer whether it was done")
    raise AssertionError("unreachable")


async def step(
    client: AsyncFleetClient, batch: Sequence[Trajectory], settings: str | None, steps: int
) -> dict[str, JsonValue]:
    """The metrics of a step; arguments as in `calls.step`, errors as in `train`."""
    try:
        return await client.send(calls.step(batch, settings, steps))
    except FleetError as error:
        if error.status not in REFUSED:
            raise
        raise BatchRefused(str(error), message=error.message, status=error.status, type=error.type) from error


def _published(status: TrainerStatus, label: str, newer_than: int) -> int | None:
    last = status.last_round if status.adapter is None else status.last_adapter
    is_it = last is not None and last.label == label and last.version > newer_than
    return last.version if last is not None and is_it else None


async def idle(client: AsyncFleetClient) -> TrainerStatus:
    """The trainer's status once it is free. Raises FleetError after `BUSY_S`."""
    deadline = time.monotonic() + BUSY_S
    while True:
        status = await client.send(calls.train_status())
        if status.doing in (None, "score"):  # a score is short, and what comes next waits for it
            return status
        if status.doing_s > BUSY_S or time.monotonic() > deadline:
            raise FleetError(
                f"the trainer is not free, and has been busy with {status.doing!r} for "
                f"{status.doing_s:.0f} s: look at its logs, and continue with --resume when it is free"
            )
        await asyncio.sleep(POLL_S)
