"""Messages between processes: each takes its time, and may be lost, doubled, late, or cut off."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from ray.exceptions import RayActorError

from tests.simulation.loop import PROCESS, Loop, Process

Resolve = Callable[[], tuple[Process, Any] | None]  # who has a name now, and the object that is called


class Unreachable(RayActorError):
    """What Ray raises for an actor that is away."""

    def __init__(self, why: str) -> None:
        super().__init__(error_msg=why)


class Network:
    """Carries calls; the faults are set from outside and hold until they are changed."""

    def __init__(self, loop: Loop, rng: Random, log: Callable[..., None]) -> None:
        self._loop = loop
        self._rng = rng
        self._log = log
        self.lose = self.double = self.late = 0.0  # probabilities of each message
        self.cut: set[str] = set()  # names of processes that reach nobody
        self.mute: set[str] = set()  # whose calls do not arrive
        self.deaf: set[str] = set()  # to whom no answer comes
        self.last_words: dict[str, float] = {}  # whose next call is its last; how late its answer comes, in s
        self.messages = 0
        self.at_message: dict[int, Callable[[], None]] = {}  # what happens when so many were sent
        self._executing: dict[Process, list[asyncio.Future[Any]]] = {}

    def call(self, resolve: Resolve, method: str, *args: Any, reliable: bool = False) -> asyncio.Future[Any]:
        """Call a method of whoever `resolve` finds when the message arrives.

        `reliable`: a connection of HTTP, on which nothing is lost or doubled.
        """
        source = PROCESS.get()
        future: asyncio.Future[Any] = self._loop.create_future()
        late_s = 0.0
        if source.name in self.last_words:
            late_s = self.last_words.pop(source.name)
            self.mute.add(source.name)
        elif source.name in self.mute:
            self._log("lost: {} from {}", method, source)
            self._break(future)
            return future
        arrive = lambda: self._arrive(resolve, method, args, source, future, reliable, late_s)  # noqa: E731
        self._send(source, method, arrive, reliable, future)
        return future

    def fail_calls_to(self, process: Process) -> None:
        """Its connections are closed by its host, which its callers hear at once, or late."""
        for future in self._executing.pop(process, ()):
            if self._rng.random() < 0.8:
                self._loop.call_later(
                    self._delay(), _fail, future, f"{process} died", context=contextvars.Context()
                )
            else:
                self._break(future)

    def _arrive(
        self,
        resolve: Resolve,
        method: str,
        args: Any,
        source: Process,
        future: asyncio.Future[Any],
        reliable: bool,
        late_s: float,
    ) -> None:
        found = resolve()
        if found is None or not found[0].alive:
            self._loop.call_later(self._delay(), _fail, future, "nobody is there")
            return
        process, target = found
        if process.stopped and self._rng.random() < 0.5:
            again = (resolve, method, args, source, future, reliable, late_s)
            process.inbox.append(lambda: self._arrive(*again))
            return
        if process.name in self.cut:
            self._break(future)
            return
        self._executing.setdefault(process, []).append(future)
        self._loop.spawn(
            process, self._execute(process, source, getattr(target, method), args, future, reliable, late_s)
        )

    async def _execute(
        self,
        process: Process,
        caller: Process,
        method: Callable[..., Awaitable[Any]],
        args: Any,
        future: asyncio.Future[Any],
        reliable: bool,
        late_s: float,
    ) -> None:
        error, result = None, None
        try:
            result = await method(*args)
        except Exception as raised:  # it travels to the caller
            error = raised
        waiting = self._executing.get(process, [])
        if future in waiting:
            waiting.remove(future)
        if caller.name in self.deaf:
            self._log("lost: answer to {}", caller)
            self._break(future)
            return
        self._send(process, "answer", lambda: _answer(future, result, error), reliable, future, late_s)

    def _send(
        self,
        source: Process,
        what: str,
        deliver: Callable[[], None],
        reliable: bool,
        future: asyncio.Future[Any],
        late_s: float = 0.0,
    ) -> None:
        self.messages += 1
        if self.messages in self.at_message:
            self.at_message.pop(self.messages)()
        fate = 1.0 if reliable else self._rng.random()
        if source.name in self.cut or fate < self.lose:
            self._log("lost: {} from {}", what, source)
            self._break(future)
            return
        copies = 1
        if fate < self.lose + self.double:
            self._log("doubled: {} from {}", what, source)
            copies = 2
        for _ in range(copies):
            delay = self._delay() + late_s
            if self.late and self._rng.random() < self.late:
                delay += self._rng.uniform(0.2, 6.0)
                self._log("late by {:.1f} s: {} from {}", delay, what, source)
            self._loop.call_at(self._loop.now + delay, deliver, context=contextvars.Context())

    def _break(self, future: asyncio.Future[Any]) -> None:
        """The caller hears of a broken connection, sooner or later."""
        self._loop.call_later(
            self._rng.uniform(0.1, 5.0), _fail, future, "connection lost", context=contextvars.Context()
        )

    def _delay(self) -> float:
        return 0.0005 + self._rng.random() * 0.004


class Handle:
    """A Serve handle: `handle.method.remote(*args)` is awaited."""

    def __init__(self, network: Network, resolve: Resolve) -> None:
        self._network = network
        self._resolve = resolve

    def __getattr__(self, method: str) -> "Method":
        return Method(self._network, self._resolve, method)


class Method:
    def __init__(self, network: Network, resolve: Resolve, name: str) -> None:
        self._network, self._resolve, self._name = network, resolve, name

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        return self._network.call(self._resolve, self._name, *args)


def _answer(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        future.exception()  # whoever called may have given up


def _fail(future: asyncio.Future[Any], why: str) -> None:
    _answer(future, None, Unreachable(why))
