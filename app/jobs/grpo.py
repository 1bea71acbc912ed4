"""The whole RL loop against a running fleet: `python -m app.jobs.grpo`, here or as a Ray job.

    producers (many)                        learner (one)
    ask the fleet, n answers a prompt       take a batch that is fresh enough
    score them                              POST /train/step      the trainer learns
    put the group into the queue            POST /train/publish   the fleet moves to the new version
       waits only while the queue is full      requests in flight go on, over the change

Nobody waits for anybody else: the fleet answers while the trainer learns and while an update
travels, so an answer may span versions. Its spans travel with it, and truncated importance weights
in the loss account for what it was sampled from.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from app.jobs import metrics
from app.jobs.groups import Group, GroupQueue
from app.jobs.options import Options, parse
from app.jobs.rollouts import FleetError, Sampling, call, parse_answers
from app.jobs.tasks import Task

PUBLISH_ATTEMPTS = 3
REQUEST_TIMEOUT_S = 900.0


@dataclass
class Run:
    """Where the loop is. `version`: the newest that the learner knows to be served."""

    options: Options
    task: Task
    client: httpx.AsyncClient
    model: str
    path: Path
    queue: GroupQueue
    version: int
    step: int = 0
    next_problem: int = 0
    generated_tokens: int = 0
    started: float = field(default_factory=time.monotonic)


async def require_fleet(client: httpx.AsyncClient, url: str) -> tuple[str, int]:
    """The model that the fleet serves, and its version.

    Raises:
        FleetError: there is no fleet at the address, or it has no trainer.
    """
    try:
        health = await client.get("/health")
        health.raise_for_status()
        version = int(health.json()["weight_version"])
        model = str((await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise FleetError(
            f"no Slipstream fleet answers at {url} ({type(error).__name__}: {error}): start one with "
            "`make serve`, wait until it says that it is up, or give its address with --url"
        ) from error
    await call(client, "GET", "/train/status")
    return model, version


async def produce(run: Run) -> None:
    """Ask, score and put, again and again; ends only by being cancelled or by an error."""
    sampling = Sampling(
        answers=run.options.answers_per_group, max_tokens=run.options.max_tokens, stop=run.options.stop
    )
    while True:
        number, run.next_problem = run.next_problem, run.next_problem + 1
        problem = run.task.problem(number)
        request = sampling.request(run.model, problem.messages)
        prompt, answers = parse_answers(await call(run.client, "POST", "/v1/chat/completions", request))
        rewards = [run.task.score(problem, answer.text) for answer in answers]
        group = Group(number=number, prompt_token_ids=prompt, answers=answers, rewards=rewards)
        run.generated_tokens += group.tokens
        await run.queue.put(group)


async def learn(run: Run) -> None:
    """Take, step and publish until the wanted number of steps is done."""
    with tqdm(total=run.options.steps, initial=run.step, unit="step", desc="grpo") as bar:
        while run.step < run.options.steps:
            row = await learn_once(run)
            metrics.append(run.path, row)
            bar.update()
            bar.set_postfix(reward=f"{row['reward']:.3f}", version=row["version"])
            tqdm.write(sentence(row))


async def learn_once(run: Run) -> dict[str, Any]:
    began, tokens_before = time.monotonic(), run.generated_tokens
    groups = await run.queue.take(run.options.groups_per_step, run.version)
    waited_s = time.monotonic() - began
    staleness = [run.version - group.oldest_version for group in groups]
    trajectories = [t for group in groups for t in group.trajectories(run.options.advantage)]
    trained: dict[str, Any] = {}
    publish_s = 0.0
    if trajectories:  # else every group was all right or all wrong: nothing to learn, nothing to publish
        trained = await call(run.client, "POST", "/train/step", {"trajectories": trajectories})
        publish_began = time.monotonic()
        report = await publish(run, label=f"step {run.step + 1}")
        run.version, publish_s = int(report["version"]), time.monotonic() - publish_began
    run.step += 1
    wall_s = time.monotonic() - began
    return {
        "step": run.step,
        "reward": sum(group.mean_reward for group in groups) / len(groups),
        "version": run.version,
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": max(staleness),
        "groups": len(groups),
        "groups_with_signal": len(trajectories) // run.options.answers_per_group,
        "groups_dropped": run.queue.dropped,
        "answer_tokens_mean": sum(g.tokens for g in groups) / sum(len(g.answers) for g in groups),
        "tokens_per_s": (run.generated_tokens - tokens_before) / wall_s,
        "step_s": wall_s,
        "wait_s": waited_s,
        "publish_s": publish_s,
        "elapsed_s": time.monotonic() - run.started,
        "next_problem": max(group.number for group in groups) + 1,
        "seed": run.options.seed,
        "trainer": trained,
        "example": groups[0].answers[0].text,
    }


async def publish(run: Run, label: str) -> dict[str, Any]:
    """One round; tried again when it was aborted, since the fleet then serves what it served."""
    for attempt in range(1, PUBLISH_ATTEMPTS + 1):
        try:
            return await call(run.client, "POST", "/train/publish", {"label": label})
        except FleetError as error:
            if "round_aborted" not in str(error) or attempt == PUBLISH_ATTEMPTS:
                raise
            tqdm.write(f"the round was aborted, trying again: {error}")
    raise AssertionError("unreachable")


def sentence(row: dict[str, Any]) -> str:
    trained = row["trainer"]
    return (
        f"step {row['step']:>3}  reward {row['reward']:.3f}  version {row['version']}  "
        f"staleness {row['staleness_mean']:.1f}  {row['tokens_per_s']:.0f} tokens/s  "
        f"loss {trained.get('loss', 0.0):+.4f}  {row['step_s']:.1f} s  {row['example']!r}"
    )


def resume(run: Run, past: Sequence[dict[str, Any]]) -> None:
    """Go on after the last row of a run's record.

    Raises:
        ValueError: the record is of other problems.
    """
    if not past:
        return
    last = past[-1]
    if last["seed"] != run.options.seed:
        raise ValueError(f"the run to resume has --seed {last['seed']}, got {run.options.seed}")
    run.step, run.next_problem = int(last["step"]), int(last["next_problem"])


async def main(options: Options) -> None:
    task = options.load_task()
    headers = {"authorization": f"Bearer {options.token}"} if options.token is not None else {}
    limits = httpx.Limits(max_connections=options.groups_in_flight + 4)
    # trust_env=False: a proxy of the environment is for the internet, not for the fleet next door.
    async with httpx.AsyncClient(
        base_url=options.url, headers=headers, timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False
    ) as client:
        model, version = await require_fleet(client, options.url)
        path = options.metrics
        if path is None:
            path = metrics.newest_metrics_file() if options.resume else metrics.new_metrics_file()
        queue = GroupQueue(capacity=options.groups_per_step, max_staleness=options.max_staleness)
        run = Run(options, task, client, model, path, queue, version)
        if options.resume:
            resume(run, metrics.rows(path))
        print(f"GRPO on {model} at {options.url} from version {version}; metrics in {path}", flush=True)
        await together(learn(run), [produce(run) for _ in range(options.groups_in_flight)])


async def together(main_task: Any, others: Sequence[Any]) -> None:
    """Run until `main_task` ends, or one of the others fails; then nothing is left running."""
    tasks = [asyncio.ensure_future(main_task), *[asyncio.ensure_future(other) for other in others]]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, Exception):  # what went wrong first was raised above
                await task


if __name__ == "__main__":
    try:
        asyncio.run(main(parse()))
    except (FleetError, ValueError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
