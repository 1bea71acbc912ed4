"""The whole RL loop against a running fleet: `python -m app.jobs.grpo`, here or as a Ray job.

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
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue
from tqdm import tqdm

from app.client import calls
from app.client.connection import AsyncFleetClient, FleetError, token_from, without_credentials
from app.client.options import parse
from app.jobs import metrics
from app.jobs.groups import Group, GroupQueue
from app.jobs.metrics import StepRecord
from app.jobs.options import Options
from app.jobs.rollouts import Sampling, Unanswered, sample
from app.jobs.tasks import Task
from app.jobs.training import Training

REQUEST_TIMEOUT_S = 900.0
PATIENCE_S = 300.0  # the fleet may be replacing a replica


@dataclass
class Run:
    """The state of the loop."""

    options: Options
    task: Task
    client: AsyncFleetClient
    model: str
    path: Path  # of the record
    queue: GroupQueue
    version: int  # the newest that the learner knows to be served
    step: int = 0
    next_problem: int = 0
    generated_tokens: int = 0
    started: float = field(default_factory=time.monotonic)


async def require_fleet(client: AsyncFleetClient) -> tuple[str, int]:
    """The model whose answers are learned from, and its version: an adapter if the trainer trains one.

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
        return model, health.weight_version
    version = trainer.adapter_version
    if version == 0:
        training = Training(client, patience_s=PATIENCE_S, say=tqdm.write)
        version = await training.publish("start", newer_than=0)
    return trainer.adapter, version


async def produce(run: Run) -> None:
    """Sample, score and put, in a loop; ends only by cancellation or an error.

    Raises:
        FleetError: the fleet refuses, or its answers lack something that a trainer needs.
    """
    sampling = Sampling(
        answers=run.options.answers_per_group,
        max_tokens=run.options.max_tokens,
        stop=run.options.stop_strings,
    )
    while True:
        number, run.next_problem = run.next_problem, run.next_problem + 1
        problem = run.task.problem(number)
        try:
            completion = await sample(run.client, sampling.call(run.model, problem.messages))
        except Unanswered as error:
            tqdm.write(f"problem {number} is left out: {error}")
            continue
        group = Group(
            number=number,
            answers=completion.answers,
            prompt_token_ids=completion.prompt_token_ids,
            rewards=[run.task.score(problem, answer.text) for answer in completion.answers],
        )
        run.generated_tokens += group.tokens
        await run.queue.put(group)


async def learn(run: Run) -> None:
    """Take, step and publish until the wanted number of steps is done.

    Raises:
        FleetError: the fleet refuses a step, or a round aborts again and again.
    """
    with tqdm(total=run.options.steps, initial=run.step, unit="step", desc="grpo") as bar:
        while run.step < run.options.steps:
            record = await learn_once(run)
            metrics.append(run.path, record)
            bar.update()
            bar.set_postfix(reward=f"{record.reward:.3f}", version=record.version)
            tqdm.write(record.line())


async def learn_once(run: Run) -> StepRecord:
    """One batch: a step and a round.

    Raises:
        FleetError: as `learn`.
    """
    began, tokens_before = time.monotonic(), run.generated_tokens
    groups = await run.queue.take(run.options.groups_per_step, run.version)
    waited_s = time.monotonic() - began
    staleness = [run.version - group.oldest_version for group in groups]
    trajectories = [t for group in groups for t in group.trajectories(run.options.advantage)]
    trained: dict[str, JsonValue] = {}
    publish_s = 0.0
    if trajectories:  # else the answers of each group were equally good: nothing to learn, nothing to publish
        training = Training(run.client, patience_s=PATIENCE_S, say=tqdm.write)
        trained = await training.step(trajectories)
        publish_began = time.monotonic()
        run.version = await training.publish(f"step {run.step + 1}", newer_than=run.version)
        publish_s = time.monotonic() - publish_began
    run.step += 1
    wall_s = time.monotonic() - began
    return StepRecord(
        step=run.step,
        reward=sum(group.mean_reward for group in groups) / len(groups),
        version=run.version,
        staleness_mean=sum(staleness) / len(staleness),
        staleness_max=max(staleness),
        groups=len(groups),
        groups_with_signal=len(trajectories) // run.options.answers_per_group,
        groups_dropped=run.queue.dropped,
        answer_tokens_mean=sum(g.tokens for g in groups) / sum(len(g.answers) for g in groups),
        tokens_per_s=(run.generated_tokens - tokens_before) / wall_s,
        step_s=wall_s,
        wait_s=waited_s,
        publish_s=publish_s,
        elapsed_s=time.monotonic() - run.started,
        next_problem=max(group.number for group in groups) + 1,
        seed=run.options.seed,
        trainer=trained,
        example=groups[0].answers[0].text,
    )


def resume(run: Run, past: Sequence[StepRecord]) -> None:
    """Continue after the last step of a run's record.

    Raises:
        ValueError: the record is of other problems.
    """
    if not past:
        return
    last = past[-1]
    if last.seed != run.options.seed:
        raise ValueError(f"the run to resume has --seed {last.seed}, got {run.options.seed}")
    run.step, run.next_problem = last.step, last.next_problem


async def main(options: Options) -> None:
    """Run the job.

    Raises:
        FleetError: no fleet, or one that refuses.
        ValueError: options that do not go together.
    """
    task = options.load_task()
    async with AsyncFleetClient.connect(
        options.url,
        token_from(),
        timeout_s=REQUEST_TIMEOUT_S,
        patience_s=PATIENCE_S,
        say=tqdm.write,
        max_connections=options.groups_in_flight + 4,
    ) as client:
        model, version = await require_fleet(client)
        path = options.metrics
        if path is None:
            path = metrics.newest_metrics_file() if options.resume else metrics.new_metrics_file()
        queue = GroupQueue(capacity=options.groups_per_step, max_staleness=options.max_staleness)
        run = Run(options, task, client, model, path, queue, version)
        if options.resume:
            resume(run, metrics.records(path))
        address, _ = without_credentials(options.url)
        print(f"GRPO on {model} at {address} from version {version}; metrics in {path}", flush=True)
        await run_together(learn(run), [produce(run) for _ in range(options.groups_in_flight)])


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
        for task in tasks:
            with suppress(asyncio.CancelledError, Exception):  # the first error was raised above
                await task


if __name__ == "__main__":
    try:
        asyncio.run(main(parse(Options)))
    except (FleetError, ValueError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
