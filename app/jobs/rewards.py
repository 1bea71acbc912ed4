"""Rewards of the user: `function(entry, answer)` by its import path.

An `async def` runs in the job's event loop. Any other function runs in a process of its own, one answer at a
time, in the main thread: in other threads `signal.alarm` fails, with which math-verify limits its time, and
some callers turn that error into a reward of 0 (verl's pull request 5635).
"""

import asyncio
import atexit
import inspect
import math
import multiprocessing
import numbers
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from app.jobs.policy import Unanswered
from app.jobs.user_code import blamed, imported
from deployments.host.fork_server.server import die_with

# (one line of the prompt file; the graded part of the answer) -> the reward
Reward = Callable[[Mapping[str, Any], str], Awaitable[float]]
TIMEOUT_S = 600.0  # for one answer
EXIT_S = 1.0  # between the end of its pipe and its exit


def load_reward(path: str) -> Reward:
    """A reward by its import path, `package.module:function`.

    Its calls raise ValueError, with a sentence, when the function raises or returns no finite number.
    """
    function = imported(path, "--reward")
    try:
        inspect.signature(function).bind({}, "")
    except TypeError as error:
        raise ValueError(f"--reward {path!r} must take (entry, answer): {error}") from error
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    return partial(awaited, function) if is_async else RewardProcess(path)


def checked(reward: Any, source: str) -> float:
    """The reward as a number; a scalar of numpy or torch is one.

    Raises:
        ValueError: it is not a finite number.
    """
    value = reward
    if not isinstance(value, numbers.Real) and callable(item := getattr(value, "item", None)):
        with suppress(ValueError, RuntimeError, TypeError):  # an array of several numbers
            value = item()
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise ValueError(f"{source} must return a finite number, got {reward!r}")


async def awaited(function: Callable[..., Awaitable[Any]], entry: Mapping[str, Any], answer: str) -> float:
    """Raises Unanswered: it took too long."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            with blamed("the reward"):
                made = await function(entry, answer)
    except TimeoutError:
        raise Unanswered(f"the reward took longer than {TIMEOUT_S:g} s") from None
    return checked(made, "the reward")


class RewardProcess:
    """A function in a process of its own, which begins with the first call."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._turn = asyncio.Lock()
        self._process: SpawnProcess | None = None
        self._pipe: Connection

    async def __call__(self, entry: Mapping[str, Any], answer: str) -> float:
        async with self._turn:
            process = self._process or self._start()
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    self._pipe.send((entry, answer))
                    await _readable(self._pipe)
                made: float | str = self._pipe.recv()
            except TimeoutError:
                self._end(process)
                raise ValueError(f"the reward took longer than {TIMEOUT_S:g} s") from None
            except (EOFError, OSError) as error:
                process.join(EXIT_S)
                self._end(process)
                raise ValueError(f"the reward's process exited with {process.exitcode}") from error
            except asyncio.CancelledError:  # what it would answer is not for the next question
                self._end(process)
                raise
        if isinstance(made, str):
            raise ValueError(made)
        return made

    def _start(self) -> SpawnProcess:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_answer, args=(self._path, theirs))  # a daemon has no children
        self._process.start()
        theirs.close()
        atexit.register(self._process.kill)
        return self._process

    def _end(self, process: SpawnProcess) -> None:
        process.kill()
        process.join()
        self._process = None


async def _readable(pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    loop.add_reader(pipe.fileno(), arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(pipe.fileno())


def _answer(path: str, pipe: Connection) -> None:
    """The process: for each entry and answer the reward, or the sentence of a ValueError."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    die_with(parent.sentinel)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the job too
    function = imported(path, "--reward")
    while True:
        try:
            entry, answer = pipe.recv()
        except EOFError:  # the job ends
            return
        try:
            made: float | str = checked(_called(function, entry, answer), "the reward")
        except ValueError as error:
            made = str(error)
        sys.stdout.flush()  # what it printed; this process is killed in the end
        pipe.send(made)


def _called(function: Callable[..., Any], entry: Mapping[str, Any], answer: str) -> Any:
    async def result(later: Awaitable[Any]) -> Any:
        return await later

    with blamed("the reward"):
        made = function(entry, answer)
        return asyncio.run(result(made)) if inspect.isawaitable(made) else made
