"""Notices that a replica which sends nothing is gone, so that it does not hold its clients for ever.

    request ─► no byte for SILENCE_S ─► does the replica's server answer anything? ─► yes: wait on
                                                                                  └─► no: give up

Silence alone says nothing: an answer that is not streamed takes as long as its generation. A process that has
ended closes its connections and needs none of this; one that is stopped, or whose host is cut off, does not.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

SILENCE_S = 30.0
PROBE_TIMEOUT_S = 30.0  # a replica that reads a long list of prompts may be busy for seconds


class Heard(Protocol):
    """Something that arrives.

    Attributes:
        heard_at: the event loop's time at which a byte came last.
    """

    heard_at: float


class Patience:
    """The wait for one answer.

    Args:
        alive: asks the replica; False: it does not answer.
        give_up: called once, when the replica is gone.
    """

    def __init__(
        self, alive: Callable[[], Awaitable[bool]], give_up: Callable[[], None], silence_s: float
    ) -> None:
        self._alive = alive
        self.give_up = give_up
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._source: Heard | None = None
        self._timer = self._loop.call_later(silence_s, self._look)
        self._asking: asyncio.Task[None] | None = None

    def follow(self, source: Heard) -> None:
        """The answer has begun, and arrives by `source`."""
        self._source = source

    def close(self) -> None:
        """The answer is complete, or nobody waits for it."""
        self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    def _look(self) -> None:
        left_s = self._heard_at() + self._silence_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        else:
            self._asking = self._loop.create_task(self._ask())

    async def _ask(self) -> None:
        heard_at = self._heard_at()
        if await self._alive() or self._heard_at() != heard_at:
            self._timer = self._loop.call_later(self._silence_s, self._look)
        else:
            self.give_up()

    def _heard_at(self) -> float:
        return self._began if self._source is None else self._source.heard_at


class Probes:
    """One question to a replica at a time, whoever waits for it."""

    def __init__(self, ask: Callable[[str, str], Awaitable[bool]]) -> None:
        self._ask = ask
        self._running: dict[str, asyncio.Task[bool]] = {}

    async def alive(self, address: str, key: str) -> bool:
        """Whether a replica's server answers."""
        running = self._running.get(address)
        if running is None:
            running = asyncio.ensure_future(self._ask(address, key))
            self._running[address] = running
            running.add_done_callback(lambda _: self._running.pop(address, None))
        return await asyncio.shield(running)
