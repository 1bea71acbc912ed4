"""The trainer's steps and publishes, each done once although its answer may be lost.

trainer dies      Serve starts another one, which resumes from the committed version. A step without its
                  publish is repeated. Without the version it refuses everything, and the job ends.
router, job die   the trainer knows its steps and publishes by their label, and does none of them again
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
BUSY_S = 3600.0  # above the trainer's STEP_TIMEOUT_S
REFUSED = (400, 413, 422)  # refused batch
REPEATED = ("answer_lost", "other_step", "round_aborted")


class BatchRefused(FleetError):
    """The trainer refuses to learn from a batch, and has not."""


async def train(run: Run, batch: Sequence[Trajectory], record: StepRecord, label: str) -> StepRecord:
    """The record after a step and its publish, or after what a killed job made of them; `label` names the
    batch.

    Raises:
        BatchRefused: the trainer refuses the batch.
        FleetError: the fleet refuses, another job makes steps, or something was lost `ATTEMPTS` times.
    """
    client = run.policy.client
    most: int | None = None  # steps that the trainer has done, if all since are this run's
    for attempt in range(1, ATTEMPTS + 1):
        began, run.doing = time.monotonic(), "waiting for the trainer"
        status = await idle(client)
        if most is not None and status.step > most:
            raise FleetError(
                f"step {record.step}: expected a trainer after step {most}, got one after step "
                f"{status.step}: another job trains it. End one of them, and continue with --resume"
            )
        most, run.doing = status.step, f"the trainer learns from {len(batch)} answers"
        try:
            metrics = await step(client, batch, run.step_settings, most, label)
            trained, done = time.monotonic(), metrics["step"]
            assert isinstance(done, int), "the trainer counts its steps"
            most = max(most, done)  # others may have made steps since a killed job made this one
            version = (await client.send(calls.publish(label, most))).version
            ended = time.monotonic()
            return replace(
                record, version=version, trainer=metrics, train_s=trained - began, publish_s=ended - trained
            )
        except FleetError as error:
            is_lost = error.status is None or error.type in REPEATED
            if not is_lost or attempt == ATTEMPTS:
                raise
            if error.type != "other_step":
                most = max(most, status.step + 1)  # it may have been made
            run.say(f"step {record.step}: {error}; asking the trainer whether it was done")
    raise AssertionError("unreachable")


async def step(
    client: AsyncFleetClient, batch: Sequence[Trajectory], settings: str | None, done: int, label: str
) -> dict[str, JsonValue]:
    try:
        return await client.send(calls.step(batch, settings, done, label))
    except FleetError as error:
        if error.status not in REFUSED:
            raise
        raise BatchRefused(str(error), message=error.message, status=error.status, type=error.type) from error


async def idle(client: AsyncFleetClient) -> TrainerStatus:
    """The trainer's status once it is free. Raises FleetError after `BUSY_S`."""
    deadline = time.monotonic() + BUSY_S
    while True:
        status = await client.send(calls.train_status())
        if status.doing in (None, "score"):  # a score is short, and the next call waits for it
            return status
        if status.doing_s > BUSY_S or time.monotonic() > deadline:
            raise FleetError(
                f"the trainer is not free, and has been busy with {status.doing!r} for "
                f"{status.doing_s:.0f} s: look at its logs, and continue with --resume when it is free"
            )
        await asyncio.sleep(POLL_S)
