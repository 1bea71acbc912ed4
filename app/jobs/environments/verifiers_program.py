"""Runs rollouts of a verifiers environment for an RL job; a program of the Python that has verifiers.

    python verifiers_program.py [what vf-eval takes: TASKSET @ FILE.toml --select... --client...]

Lines of JSON come in, each with `id`, `task` (its position in the task set), `url` and `model`; one goes out
for each: `id`, and `reward`, `sessions` and `text`, or `error`. The first one out says how many `tasks` there
are (null: no end). Ends with its input.
"""

import asyncio
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

STOP_TIMEOUT_S = 20.0  # of verifiers' servers, when the job has ended


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the environment prints is no answer
    try:
        asyncio.run(serve(answers, load(sys.argv[1:])))
    except Exception as error:
        say(answers, {"error": _one_line(error)})
        raise SystemExit(1) from error


def load(arguments: list[str]) -> Any:
    """verifiers' configuration of an evaluation, from the arguments of its own command."""
    from pydantic_config import cli
    from verifiers.v1.cli.resolve import narrow_config, with_positional_taskset
    from verifiers.v1.configs.cli.eval import EvalConfig

    named = with_positional_taskset(arguments)
    config_type = narrow_config(EvalConfig, named)
    sys.argv = ["vf-eval", *named]
    return cli(config_type)


async def serve(answers: TextIO, config: Any) -> None:
    """Answer each line, many at once, until there are no more."""
    from verifiers.v1.utils.loaders import load_environment

    environment = load_environment(config.env)
    tasks = Tasks(environment.taskset.select(config.select))
    lines: asyncio.Queue[str] = asyncio.Queue()
    async with environment.serving():
        say(answers, {"tasks": tasks.count})
        _read_lines(asyncio.get_running_loop(), lines.put_nowait)
        running: set[asyncio.Task[None]] = set()
        while line := await lines.get():
            task = asyncio.create_task(_respond(answers, json.loads(line), environment, tasks, config))
            running.add(task)
            task.add_done_callback(running.discard)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class Tasks:
    """The tasks of a set by position, read when they are asked for; a set that ends begins anew."""

    def __init__(self, taskset: Any) -> None:
        self._iterator: Iterator[Any] = iter(taskset)
        self._read: list[Any] = []
        self.count: int | None = None
        if taskset.bounded:
            self._read = list(self._iterator)
            self.count = len(self._read)
            if not self._read:
                raise ValueError("the task set has no tasks; look at --select")

    def __getitem__(self, number: int) -> Any:
        position = number if self.count is None else number % self.count
        missing = position + 1 - len(self._read)
        self._read += itertools.islice(self._iterator, max(0, missing))
        return self._read[position]


async def _respond(
    answers: TextIO, asked: dict[str, Any], environment: Any, tasks: Tasks, config: Any
) -> None:
    try:
        result = await _roll_out(environment, tasks[asked["task"]], config, asked)
    except Exception as error:
        result = {"error": _one_line(error)}
    say(answers, {"id": asked["id"], **result})


async def _roll_out(environment: Any, task: Any, config: Any, asked: dict[str, Any]) -> dict[str, Any]:
    from verifiers.v1.clients import ModelContext

    client = config.client.model_copy(update={"base_url": f"{asked['url']}/v1"})
    context = ModelContext(client=client, model=asked["model"], sampling=config.sampling)
    (slot,) = environment.slots(task)
    episode = await environment.run_slot(slot, context)
    if not episode.ok or len(episode.traces) != 1:
        errors = [*episode.errors, *[error for trace in episode.traces for error in trace.errors]]
        wrong = (
            "; ".join(f"{error.type}: {error.message}" for error in errors)
            or f"{len(episode.traces)} agents, expected one"
        )
        return {"error": wrong.partition("\n")[0][:500]}
    (trace,) = episode.traces
    texts = [node.message.content for node in trace.nodes if node.message.role == "assistant"]
    text = " | ".join(each for each in texts if isinstance(each, str))
    return {"reward": float(trace.reward), "sessions": [trace.id], "text": text}


def _read_lines(loop: asyncio.AbstractEventLoop, put: Callable[[str], None]) -> None:
    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(put, line)
        threading.Timer(STOP_TIMEOUT_S, os._exit, [1]).start()
        loop.call_soon_threadsafe(put, "")

    threading.Thread(target=read, daemon=True).start()


def say(answers: TextIO, line: dict[str, Any]) -> None:
    """One line, at once."""
    answers.write(json.dumps(line) + "\n")
    answers.flush()


def _one_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    main()
