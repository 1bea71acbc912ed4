"""The RL loop against a running fleet.

    producers (many)                              learner (one)
    POST /rollouts/begin    a problem's group     POST /rollouts/take   a batch that is fresh enough
    sample n rollouts, score them                 POST /train/step      the trainer learns
    POST /rollouts/settle   their rewards         POST /train/publish   the fleet moves to the new version
       wait only while enough are ready             running requests continue across the change

The rollouts are in the fleet's ledger (`deployments.rollouts`): a killed job loses none. Generation never
waits for the trainer, so rollouts may span versions; truncated importance weights account for that.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from app.client import calls
from app.client.announcement import announced
from app.client.connection import AsyncFleetClient, FleetError, token_from, without_credentials
from app.jobs import metrics
from app.jobs.environments.environment import Environment
from app.jobs.learning import continued, learn
from app.jobs.loading import load_environments
from app.jobs.metrics import Configuration
from app.jobs.options import JobOptions
from app.jobs.policy import Policy
from app.jobs.run import Run, produce
from app.jobs.run_display import STATUS_S, Display
from app.jobs.task_groups import run_beside
from app.jobs.teacher import opened
from app.jobs.trackers import Trackers, open_trackers
from app.jobs.training import PATIENCE_S
from deployments.protocol.responses import TrainerStatus

REQUEST_TIMEOUT_S = 900.0
STATUS_CHECK_S = 0.5


async def trained_policy(client: AsyncFleetClient, options: JobOptions) -> tuple[Policy, int]:
    """The trained model or adapter, and its version; publishes an adapter that has none. Raises FleetError if
    the fleet refuses, or its trainer lacks the served version."""
    model = await client.send(calls.model())
    trainer = await client.send(calls.train_status())
    version = (await client.send(calls.health())).weight_version
    if trainer.version != version:  # it may have published since
        trainer = await client.send(calls.train_status())
    _require_served(trainer, version)
    if trainer.adapter is not None:
        model, version = trainer.adapter, trainer.adapter_version
        if version == 0:
            version = (await client.send(calls.publish("start"))).version
    policy = Policy(
        client=client,
        model=model,
        max_tokens=options.max_tokens,
        stop=options.stop_strings,
        is_adapter=trainer.adapter is not None,
    )
    return policy, version


def _require_served(trainer: TrainerStatus, version: int) -> None:
    if trainer.missed is not None:
        raise FleetError(trainer.missed)
    if trainer.adapter is None and trainer.doing is None and trainer.version != version:
        raise FleetError(
            f"the fleet serves version {version}, and its trainer has version {trainer.version}: `slipstream "
            f"rollback {version}` makes the trainer continue from the former, `slipstream rollback "
            f"{trainer.version}` from the latter"
        )


def record_file(options: JobOptions) -> Path:
    if options.metrics is not None:
        return options.metrics
    return metrics.newest_metrics_file() if options.resume else metrics.new_metrics_file()


async def prepared(
    client: AsyncFleetClient,
    options: JobOptions,
    environments: tuple[Environment, Environment],
    path: Path,
    output: Display,
    began: float,
) -> Run:
    with announced("RL job: asking the fleet for its model and its trainer", STATUS_S):
        policy, version = await trained_policy(client, options)
    before = metrics.last_configuration(path) if options.resume else None
    name = before.run_id if before is not None and before.run_id else uuid.uuid4().hex[:8]
    run = Run(options, *environments, policy, path, name, version, output, began)
    for line in [] if before is None else differences(before, configured(run)):
        run.say(f"--resume: {line}")
    with announced(f"RL job: asking the fleet what it has of run {name}", STATUS_S):
        await continued(run, metrics.records(path) if options.resume else ())
    return run


@contextmanager
def only_job(url: str) -> Iterator[None]:
    """Claim the fleet among this host's jobs. Raises ValueError."""
    name = b"\0slipstream-rl-" + sha256(without_credentials(url)[0].encode()).digest()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as held:
        try:
            held.bind(name)
        except OSError:
            raise ValueError("another RL job of this host trains this fleet: end it first") from None
        yield


async def loop(run: Run, trackers: Trackers) -> None:
    count = 0 if run.options.imitates else run.options.groups_in_flight
    producers = [produce(run) for _ in range(count)]
    await run_beside(learn(run, trackers), [*producers, show_status(run)])


async def show_status(run: Run) -> None:
    while True:
        run.output.status(run.status())
        await asyncio.sleep(STATUS_CHECK_S)


async def main(options: JobOptions, began: float) -> None:
    """`began`: the start of its process, on the monotonic clock."""
    end_on_signals()
    with announced("RL job: loading the task", STATUS_S):
        learned, held_out = load_environments(options)
    async with AsyncExitStack() as stack:
        out = stack.enter_context(Display())
        client = await stack.enter_async_context(connected(options, out))
        if options.dry_run:
            await try_out(client, options, learned, out)
            return
        stack.enter_context(only_job(options.url))
        path = record_file(options)
        stack.enter_context(metrics.claimed(path, options.resume))
        run = await prepared(client, options, (learned, held_out), path, out, began)
        run.teacher = await stack.enter_async_context(opened(options, run.policy, run.version, out.line))
        configuration = configured(run)
        metrics.append(path, configuration)
        if options.log:  # wandb may wait for its server
            out.line(f"RL job: opening {', '.join(options.log)}")
        trackers = Trackers(open_trackers(options.log or (), path, configuration), out.line)
        for environment in [learned] if held_out is learned else [learned, held_out]:
            await stack.enter_async_context(environment.running())
        out.line(f"GRPO on {run.policy.model} from version {run.version}; metrics in {path}")
        try:
            await loop(run, trackers)
        except asyncio.CancelledError:
            out.line(f"stopped after step {run.step} of {options.steps}; --resume continues the run")
            raise
        finally:
            out.close()
            out.line(f"metrics in {path}")
            trackers.close()


def connected(options: JobOptions, out: Display) -> AsyncFleetClient:
    return AsyncFleetClient.connect(
        options.url,
        token_from(),
        timeout_s=REQUEST_TIMEOUT_S,
        patience_s=PATIENCE_S,
        say=out.line,
        at_once=options.groups_in_flight * options.answers_per_group + 4,
    )


def shown(options: JobOptions) -> dict[str, Any]:
    """As JSON has them, and without the tokens in URLs."""
    given = asdict(options)
    for name in ("url", "teacher", "reward"):
        if "://" in str(given[name]):
            given[name], _ = without_credentials(given[name])
    return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}


def configured(run: Run) -> Configuration:
    prompts = run.options.prompts
    return Configuration(
        options=shown(run.options),
        model=run.policy.model,
        version=run.version,
        began=time.time(),
        run_id=run.name,
        prompts_digest=None if prompts is None else sha256(prompts.read_bytes()).hexdigest(),
    )


PROBLEM_OPTIONS = ("task", "task_settings", "prompts", "environment", "seed")
JOB_OPTIONS = ("url", "steps", "metrics", "log", "dry_run", "resume")


def differences(before: Configuration, now: Configuration) -> list[str]:
    """Other differences from the run's last start. Raises ValueError if the problems differ: the ledger has
    only their numbers."""
    found = {
        name: f"--{name.replace('_', '-')} was {before.options.get(name)!r}, and is {value!r} now"
        for name, value in now.options.items()
        if name not in JOB_OPTIONS and name in before.options and before.options[name] != value
    }
    if before.prompts_digest is not None and before.prompts_digest == now.prompts_digest:
        found.pop("prompts", None)
    elif before.prompts_digest is not None and now.prompts_digest is not None:
        found.setdefault("prompts", f"{now.options['prompts']} has changed")
    if others := [found[name] for name in PROBLEM_OPTIONS if name in found]:
        raise ValueError(
            f"the run to resume has other problems: {'; '.join(others)}. Begin a run of its own for them, "
            "with another --metrics: the trainer goes on from where it is"
        )
    if before.model != now.model:
        found["model"] = f"the model was {before.model!r}, and is {now.model!r} now"
    return list(found.values())


async def try_out(
    client: AsyncFleetClient, options: JobOptions, environment: Environment, out: Display
) -> None:
    """Changes nothing."""
    for name, value in shown(options).items():
        if value is not None and name not in ("url", "dry_run"):
            out.line(f"{name} = {json.dumps(value)}")
    out.line(await environment.sample())
    try:
        model = await client.send(calls.model(), patient=False)
        trainer = await client.send(calls.train_status(), patient=False)
        out.line(f"the fleet serves {model}, and its trainer has done {trainer.step} steps")
    except FleetError as error:
        out.line(f"the fleet was not asked: {error}")


def end_on_signals() -> None:
    """SIGTERM and SIGHUP cancel this task like Ctrl-C; under `nohup` SIGHUP stays ignored."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, task.cancel)


def run(options: JobOptions, began: float) -> int:
    try:
        asyncio.run(main(options, began))
    except BrokenPipeError:  # stdout is closed (`| head`); buffered output would raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("slipstream: nobody reads the output, the RL job ends", file=sys.stderr)
        return 1
    except (FleetError, ValueError, OSError) as error:  # OSError: the record, a tracker
        is_refused = isinstance(error, FleetError) and error.status == 401
        where = ". Its place is SLIPSTREAM_TOKEN, or the file SLIPSTREAM_TOKEN_FILE" if is_refused else ""
        print(f"slipstream: {error}{where}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    return 0
