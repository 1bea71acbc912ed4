"""Your own rewards, `function(entry, answer)` by import path, and what else they ask for by name.

An `async def` runs in the job's event loop. Other functions run in processes, one answer at a time, in the
main thread: elsewhere `signal.alarm`, math-verify's time limit, fails, and some callers turn that into a
reward of 0 (verl's pull request 5635).
"""

import asyncio
import atexit
import inspect
import multiprocessing
import numbers
import os
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

# Arguments that a function may take by name
DETAILS = ("messages", "token_ids", "finish_reason")
# (a line of the prompt file, the graded part of the answer, DETAILS by name) -> the reward
Reward = Callable[[Mapping[str, Any], str, Mapping[str, Any]], Awaitable[float]]
TIMEOUT_S = 600.0
EXIT_S = 1.0  # limit between end of pipe and exit


def load_reward(path: str, *, processes: int = 1, timeout_s: float = TIMEOUT_S) -> Reward:
    """A reward by its import path. It raises ValueError when the function raises or returns no finite number,
    and Unanswered when it takes longer than `timeout_s`.

    `processes`: of a function that is not `async def`.
    """
    function = imported(path, "--reward")
    signature = inspect.signature(function)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    details = [name for name in DETAILS if takes_any or name in signature.parameters]
    try:
        signature.bind({}, "", **dict.fromkeys(details))
    except TypeError as error:
        raise ValueError(
            f"--reward {path!r} must take (entry, answer), and may take {', '.join(DETAILS)}: {error}"
        ) from error
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    called = partial(awaited, function, timeout_s) if is_async else RewardPool(path, processes, timeout_s)

    async def reward(entry: Mapping[str, Any], answer: str, given: Mapping[str, Any]) -> float:
        return await called(entry, answer, {name: given.get(name) for name in details})

    return reward


async def no_reward(entry: Mapping[str, Any], answer: str, given: Mapping[str, Any]) -> float:
    """For prompts that only a teacher scores."""
    return 0.0


MAX_REWARD = 1e30


def checked(reward: Any, source: str) -> float:
    """A float; scalars of numpy or torch count. Raises ValueError unless it is finite as a float32,
    advantages' type."""
    value = reward
    if not isinstance(value, numbers.Real) and callable(item := getattr(value, "item", None)):
        with suppress(ValueError, RuntimeError, TypeError):  # an array of several numbers
            value = item()
    with suppress(OverflowError):  # an integer of 400 digits
        if isinstance(value, numbers.Real) and abs(number := float(value)) <= MAX_REWARD:  # NaN is not
            return number
    raise ValueError(f"{source} must return a finite number of at most {MAX_REWARD:g}, got {reward!r:.200}")


async def awaited(
    function: Callable[..., Awaitable[Any]],
    timeout_s: float,
    entry: Mapping[str, Any],
    answer: str,
    details: Mapping[str, Any],
) -> float:
    try:
        async with asyncio.timeout(timeout_s):
            with blamed("the reward"):
                made = await function(entry, answer, **details)
    except TimeoutError:
        raise Unanswered(f"the reward took longer than {timeout_s:g} s") from None
    return checked(made, "the reward")


class RewardPool:
    def __init__(self, path: str, processes: int, timeout_s: float) -> None:
        self._idle = asyncio.LifoQueue[RewardProcess]()  # it has run already
        for _ in range(processes):
            self._idle.put_nowait(RewardProcess(path, timeout_s))

    async def __call__(self, entry: Mapping[str, Any], answer: str, details: Mapping[str, Any]) -> float:
        process = await self._idle.get()
        try:
            return await process.score(entry, answer, details)
        finally:
            self._idle.put_nowait(process)


class RewardProcess:
    """Starts with the first answer, and again after it was killed."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._process: SpawnProcess | None = None
        self._pipe: Connection
        atexit.register(self._end)

    async def score(self, entry: Mapping[str, Any], answer: str, details: Mapping[str, Any]) -> float:
        process = self._process or self._start()
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.to_thread(self._pipe.send, (entry, answer, details))  # it may still import
                await _readable(self._pipe)
            made: float | str = self._pipe.recv()
        except TimeoutError:
            self._end()
            raise Unanswered(f"the reward took longer than {self._timeout_s:g} s") from None
        except (EOFError, OSError) as error:
            process.join(EXIT_S)
            self._end()
            raise ValueError(f"the reward's process exited with {process.exitcode}") from error
        except asyncio.CancelledError:  # its reply would answer the next question
            self._end()
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
        return self._process

    def _end(self) -> None:
        """Also ends what the function started. One that waits for a disk may not exit."""
        process, self._process = self._process, None
        if process is not None and process.pid is not None:
            with suppress(ProcessLookupError):  # it leads no group yet
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join(EXIT_S)


async def _readable(pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    loop.add_reader(pipe.fileno(), arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(pipe.fileno())


def _answer(path: str, pipe: Connection) -> None:
    """In the process: replies with the reward, or a ValueError's text."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    die_with(parent.sentinel)
    os.setsid()  # a group of its own, with what the function starts; and no signals of the terminal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a Ray job's processes all get it; the job ends this one
    function = imported(path, "--reward")
    while True:
        try:
            entry, answer, details = pipe.recv()
        except EOFError:  # the job ends
            return
        try:
            made: float | str = checked(_called(function, entry, answer, details), "the reward")
        except ValueError as error:
            made = str(error)
        sys.stdout.flush()  # what it printed; this process will be killed
        pipe.send(made)


def _called(
    function: Callable[..., Any], entry: Mapping[str, Any], answer: str, details: Mapping[str, Any]
) -> Any:
    async def result(later: Awaitable[Any]) -> Any:
        return await later

    with blamed("the reward"):
        made = function(entry, answer, **details)
        return asyncio.run(result(made)) if inspect.isawaitable(made) else made
