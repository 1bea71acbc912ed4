"""Runs rollouts of a verifiers environment for an RL job, in a Python that has verifiers.

    python verifiers_program.py [what vf-eval takes: TASKSET @ FILE.toml --select... --client...]

Lines of JSON on stdin: `id`, `task` (its position in the task set), `url` and `model`, or `id` and `cancel`.
Lines on stdout: first `{}` when ready, or an `error`; then `id` with `reward`, `sessions` and `text`, or with
an `error`. When stdin ends, also because the job was killed, it kills everything that it started and exits.
"""

import asyncio
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO

MARK = "SLIPSTREAM_ROLLOUTS"
STOP_TIMEOUT_S = 20.0  # limits the stop of servers
KILL_TIMEOUT_S = 5.0


class RolloutRunner(Protocol):
    async def roll_out(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The answer to a line, without its `id`."""


class VerifiersRunner:
    def __init__(self, environment: Any, config: Any) -> None:
        self._environment = environment
        self._config = config
        self._tasks = Tasks(environment.taskset.select(config.select))

    async def roll_out(self, asked: dict[str, Any]) -> dict[str, Any]:
        from verifiers.v1.clients import ModelContext

        client = self._config.client.model_copy(update={"base_url": f"{asked['url']}/v1"})
        context = ModelContext(client=client, model=asked["model"], sampling=self._config.sampling)
        (slot,) = self._environment.slots(self._tasks[asked["task"]])
        episode = await self._environment.run_slot(slot, context)
        sessions = [trace.id for trace in episode.traces]
        if not episode.ok or len(episode.traces) != 1:
            errors = [*episode.errors, *[error for trace in episode.traces for error in trace.errors]]
            wrong = (
                "; ".join(f"{error.type}: {error.message}" for error in errors)
                or f"{len(episode.traces)} agents, expected one"
            )
            return {"error": wrong.partition("\n")[0][:500], "sessions": sessions}
        (trace,) = episode.traces
        text = " | ".join(_text(message) for message in trace.assistant_messages)
        return {"reward": float(trace.reward), "sessions": sessions, "text": text}


@asynccontextmanager
async def opened(arguments: list[str]) -> AsyncIterator[RolloutRunner]:
    from pydantic_config import cli
    from verifiers.v1.cli.resolve import narrow_config, with_positional_taskset
    from verifiers.v1.configs.cli.eval import EvalConfig
    from verifiers.v1.utils.loaders import load_environment

    named = with_positional_taskset(arguments)
    config_type = narrow_config(EvalConfig, named)
    sys.argv = ["vf-eval", *named]
    config = cli(config_type)
    environment = load_environment(config.env)
    runner = VerifiersRunner(environment, config)
    async with environment.serving():
        yield runner


class Tasks:
    """Read on demand, by position; a bounded set repeats."""

    def __init__(self, taskset: Any) -> None:
        self._iterator: Iterator[Any] = iter(taskset)
        self._bounded = bool(taskset.bounded)
        self._read: list[Any] = list(self._iterator) if self._bounded else []
        if self._bounded and not self._read:
            raise ValueError("the task set has no tasks; look at --select")

    def __getitem__(self, number: int) -> Any:
        position = number % len(self._read) if self._bounded else number
        self._read += itertools.islice(self._iterator, max(0, position + 1 - len(self._read)))
        return self._read[position]


Opened = Callable[[list[str]], AbstractAsyncContextManager[RolloutRunner]]


def run(opened: Opened) -> None:
    asked, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # tools must not read the job's lines
    os.dup2(2, 1)  # prints of the environment
    try:
        asyncio.run(serve(asked, answers, opened))
    except Exception as error:
        with suppress(OSError):
            write(answers, {"error": _one_line(error)})
        raise SystemExit(1) from error
    finally:
        kill_marked(os.environ.get(MARK, ""))


async def serve(asked: TextIO, answers: TextIO, opened: Opened) -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    _read_lines(asked, asyncio.get_running_loop(), lines.put_nowait)
    running: dict[int, asyncio.Task[None]] = {}
    async with opened(sys.argv[1:]) as runner:
        write(answers, {})
        while text := await lines.get():
            line = json.loads(text)
            number = line["id"]
            if "cancel" not in line:
                running[number] = task = asyncio.create_task(_respond(answers, line, runner))
                task.add_done_callback(partial(_forget, running, number))
            elif number in running:
                running[number].cancel()
        left = list(running.values())
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def _forget(running: dict[int, asyncio.Task[None]], number: int, task: asyncio.Task[None]) -> None:
    del running[number]


async def _respond(answers: TextIO, asked: dict[str, Any], runner: RolloutRunner) -> None:
    try:
        result = await runner.roll_out(asked)
    except Exception as error:  # foreign code may raise anything
        result = {"error": _one_line(error)}
    write(answers, {"id": asked["id"], **result})


def _read_lines(asked: TextIO, loop: asyncio.AbstractEventLoop, put: Callable[[str], None]) -> None:
    def read() -> None:
        for line in asked:
            loop.call_soon_threadsafe(put, line)
        # The job may be gone: writes to its pipes would fail.
        with open(os.devnull, "w") as nothing:
            for descriptor in (1, 2):
                os.dup2(nothing.fileno(), descriptor)
        watchdog = threading.Timer(STOP_TIMEOUT_S, _exit_now)
        watchdog.daemon = True
        watchdog.start()
        loop.call_soon_threadsafe(put, "")

    threading.Thread(target=read, daemon=True).start()


def _exit_now() -> None:
    kill_marked(os.environ.get(MARK, ""))
    os._exit(1)


def kill_marked(mark: str) -> None:
    """They may start more meanwhile."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while mark and (found := list(_marked(mark))) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _marked(mark: str) -> Iterator[int]:
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):  # it has exited, or is another user's
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


def _text(message: Any) -> str:
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls or ()]
    return " ".join([str(message.content or ""), *calls]).strip()


def write(answers: TextIO, line: dict[str, Any]) -> None:
    answers.write(json.dumps(line) + "\n")
    answers.flush()


def _one_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    run(opened)
