"""The whole RL loop against a running fleet: `python -m app.jobs`, here or as a Ray job.

    producers (many)                        learner (one)
    sample n answers to a prompt            take a batch that is fresh enough
    score them                              POST /train/step      the trainer learns
    put the group into the queue            POST /train/publish   the fleet moves to the new version
       waits only while the queue is full      running requests continue across the change

Generation never waits for the trainer: the fleet answers while the trainer learns and during an update, so an
answer may span versions. The batch carries these spans, and truncated importance weights in the loss account
for the weights behind each token.
"""

import asyncio
import sys
from collections.abc import Awaitable, Sequence
from pathlib import Path

from app.client import calls
from app.client.connection import AsyncFleetClient, FleetError, token_from, without_credentials
from app.client.options import parse
from app.jobs import metrics
from app.jobs.environments.environment import running
from app.jobs.groups import GroupQueue
from app.jobs.learning import learn, publish_best, resume
from app.jobs.metrics import Tracker, open_trackers, reward_curve
from app.jobs.options import Options
from app.jobs.progress import Progress, announced
from app.jobs.rollouts import Policy, Sampling
from app.jobs.run import PATIENCE_S, Run, produce
from app.jobs.training import Training

REQUEST_TIMEOUT_S = 900.0


async def require_fleet(client: AsyncFleetClient) -> tuple[str, int, bool]:
    """The model whose answers are learned from, its version, and whether it is an adapter that is trained.

    An adapter that the fleet has no version of yet is published first, so that there is one to sample from.

    Raises:
        FleetError: no fleet answers, or it has no trainer.
    """
    try:
        health = await client.send(calls.health(), patient=False)
        model = await client.send(calls.model(), patient=False)
    except FleetError as error:
        raise FleetError(
            f"{error}; start a fleet with `make serve`, wait until it is up, or give its address with --url"
        ) from error
    trainer = await client.send(calls.train_status())
    if trainer.adapter is None:
        return model, health.weight_version, False
    version = trainer.adapter_version
    if version == 0:
        training = Training(client, patience_s=PATIENCE_S, say=print)
        version = await training.publish("start", newer_than=0)
    return trainer.adapter, version, True


def record_file(options: Options) -> Path:
    """Where the run's record is.

    Raises:
        ValueError: there is no run to resume.
    """
    if options.metrics is not None:
        return options.metrics
    return metrics.newest_metrics_file() if options.resume else metrics.new_metrics_file()


async def main(options: Options, began: float) -> None:
    """Run the job; `began` is when its process did, on the monotonic clock.

    Raises:
        FleetError: no fleet, or one that refuses.
        ValueError: options that do not go together.
    """
    with announced("RL job: loading the task"):
        environment, held_out = options.load_environments()
    path = record_file(options)
    trackers = open_trackers(options.log or (), path)
    async with AsyncFleetClient.connect(
        options.url,
        token_from(),
        timeout_s=REQUEST_TIMEOUT_S,
        patience_s=PATIENCE_S,
        say=tell,
        max_connections=options.groups_in_flight * options.answers_per_group + 4,
    ) as client:
        with announced("RL job: asking the fleet for its model and its trainer"):
            model, version, is_adapter = await require_fleet(client)
        sampling = Sampling(
            answers=options.answers_per_group, max_tokens=options.max_tokens, stop=options.stop_strings
        )
        policy = Policy(client=client, model=model, sampling=sampling, is_adapter=is_adapter)
        queue = GroupQueue(capacity=options.groups_per_step, max_staleness=options.max_staleness)
        run = Run(options, environment, held_out, policy, path, queue, version, tell, started=began)
        if options.resume:  # a trainer in the middle of a step answers when it is over
            with announced(f"RL job: continuing {path}, asking the trainer what it has done"):
                await resume(run, metrics.records(path))
        async with running((environment, held_out)):
            address, _ = without_credentials(options.url)
            tell(f"GRPO on {model} at {address} from version {run.version}; metrics in {path}")
            with Progress(steps=options.steps, done=run.step, state=run.state) as progress:
                run.say = progress.say
                await loop(run, progress, trackers)
        for tracker in trackers:
            tracker.close()
        curve = reward_curve(metrics.records(path))
        tell(f"{curve}\nmetrics in {path}" if curve else f"metrics in {path}")


async def loop(run: Run, progress: Progress, trackers: Sequence[Tracker]) -> None:
    """Learn while producers sample, to the last step.

    Raises:
        FleetError, ValueError: as `main`.
    """
    others = [produce(run) for _ in range(run.options.groups_in_flight)]
    await run_together(learn(run, progress, trackers), [*others, progress.watch()])
    await publish_best(run)


def tell(line: str) -> None:
    """Print a line at once, also into a pipe."""
    print(line, flush=True)


async def run_together(main_task: Awaitable[None], others: Sequence[Awaitable[None]]) -> None:
    """Run until `main_task` ends or one of the others fails; then cancel the rest.

    Raises:
        Exception: what the first task raised.
    """
    tasks = [asyncio.ensure_future(main_task), *[asyncio.ensure_future(other) for other in others]]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        # Not `await task`: that would raise the first error again, without its place.
        await asyncio.gather(*tasks, return_exceptions=True)


def run(began: float) -> int:
    """The job, as the program of a process; its exit status."""
    try:
        asyncio.run(main(parse(Options), began))
    except (FleetError, ValueError, OSError) as error:  # OSError: of the record, or of a tracker
        print(f"slipstream: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
