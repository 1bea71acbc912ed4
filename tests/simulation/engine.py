"""An engine without tensors: what a replica holds, how long its work takes, and how it fails.

Weights are the name of the publisher's attempt that made them. A payload is one part of an attempt; parts of
two attempts, or too few parts, are no weights.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from deployments.protocol import poll
from deployments.protocol.engine_state import InFlight, asleep, is_paused
from deployments.protocol.errors import PayloadRejected, TransferFailed
from tests.deployments.ledger.fake_engine import FakeEngine

FIRST = "checkpoint"  # the weights that the fleet starts with


class EngineFailed(RuntimeError):
    """The replica failed: its weights may be uncertain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the first and the last token of an answer were computed with."""

    first: int  # versions of the base
    last: int


@dataclass(slots=True)
class Work:
    """How engines of one schedule behave; faults are set from outside."""

    rng: Random
    fail: float = 0.0  # probability that an instruction fails
    hang: float = 0.0
    slow: float = 0.0
    flip: float = 0.0  # probability that a payload arrives damaged

    async def do(self, usually_s: float) -> None:
        seconds = usually_s * (0.5 + self.rng.random())
        if self.slow and self.rng.random() < self.slow:
            seconds += self.rng.uniform(1.0, 6.0)
        await asyncio.sleep(seconds)


class Mortal:
    """An engine's processes, which may end by themselves: what they do ends with them."""

    def __init__(self) -> None:
        self.stopped = False
        self.running = asyncio.Condition()  # notified when it may go on generating
        self._death = asyncio.Event()
        self._storing: asyncio.Task[None] | None = None

    @property
    def dead(self) -> bool:
        return self._death.is_set()

    async def die(self) -> None:
        self.stopped = True
        self._death.set()
        if self._storing is not None:
            self._storing.cancel()
        async with self.running:
            self.running.notify_all()

    async def died(self) -> str:
        await self._death.wait()
        return "its engine has died"

    async def while_alive(self, work: Awaitable[Any]) -> Any:
        """Raises EngineFailed when it dies."""
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(self._death.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self.dead:
                raise EngineFailed("the engine has died")
            return tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()


class _Engine(FakeEngine):
    """Requests are `SimMember.generate`: they continue after a pause, whatever its mode."""

    def _stop_running(self, mode: InFlight) -> None:
        assert mode is not InFlight.WAIT or not self.running, "waits for requests without a deadline"

    def _begin_waiting(self) -> None: ...


class SimMember(Mortal):
    """Implements the follower's `MemberProtocol`, and what request admission and a health check look at.

    Args:
        went_live: called when these weights become the ones that are served under a version.
        write, read: a version's path in the store, the weights at a path; or they raise OSError.
    """

    def __init__(
        self,
        version: int,
        weights: str,
        work: Work,
        went_live: Callable[[int, str], None],
        write: Callable[[int, str], str],
        read: Callable[[str, int], str],
    ) -> None:
        super().__init__()
        self.engine = _Engine(version=version, writes_at_once=False)
        self.partially_updated = False
        self.admitted = False
        self.fenced: str | None = None
        self.changed = asyncio.Condition()
        self.hangs = False
        self._work = work
        self._went_live = went_live
        self._write, self._read = write, read
        self._parts: list[tuple[str, int, int]] = []
        self.uncertain_since: float | None = None  # its weights may be a mixture
        self.fails: Callable[[poll.Body], bool] = lambda body: False  # for faults that meet another one
        self._interrupted = asyncio.Event()
        went_live(version, weights)

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def generates(self) -> bool:
        """Whether a request that comes now would be computed with `version`."""
        return self.engine.begins and not (self.hangs or self.stopped)

    @property
    def _continues(self) -> bool:
        """Whether running requests are computed; unlike a pause, a drain lets them finish."""
        engine = self.engine
        user = is_paused(engine.condition) or bool(asleep(engine.condition))
        return not (engine.held or user or self.hangs or self.stopped)

    def report(self, replica_id: str, incarnation: str) -> poll.Report:
        return self.engine.report_as(replica_id, incarnation)

    # -- MemberProtocol -----------------------------------------------------------------------------

    async def execute(self, body: poll.Body) -> poll.Value:
        value = await self.while_alive(self._execute(body))
        async with self.changed:
            self.changed.notify_all()
        return value

    async def interrupt(self) -> None:
        if self.hangs:
            await self.while_alive(asyncio.Event().wait())
        self._interrupted.set()
        self._parts = []

    def on_directive(self, directive: poll.Directive) -> None:
        self.fenced = directive.fenced
        self.admitted = directive.admitted and directive.fenced is None

    async def fence(self, reason: str) -> None:
        self.fenced, self.admitted, self.stopped = reason, False, True
        async with self.changed:
            self.changed.notify_all()
        async with self.running:
            self.running.notify_all()

    # -- instructions -------------------------------------------------------------------------

    async def _execute(self, body: poll.Body) -> poll.Value:
        work = self._work
        if self.hangs:
            await asyncio.Event().wait()
        if self.fails(body):
            raise EngineFailed(f"{body.name} failed")
        if work.fail and work.rng.random() < work.fail:
            await work.do(0.05)
            if isinstance(body, poll.Connect | poll.Receive) and work.rng.random() < 0.7:
                raise TransferFailed("a peer is gone")
            if isinstance(body, poll.Commit | poll.CatchUp):
                self.uncertain_since = asyncio.get_running_loop().time()
            raise EngineFailed(f"{body.name} failed")
        if work.hang and work.rng.random() < work.hang:
            if work.rng.random() < 0.3:
                self.hangs = True
            if self.hangs:
                await asyncio.Event().wait()
            self._interrupted.clear()
            await self._interrupted.wait()
            raise TransferFailed("interrupted")
        value = await self._carry_out(body)
        async with self.running:
            self.running.notify_all()
        return value

    async def _carry_out(self, body: poll.Body) -> poll.Value:
        work, engine = self._work, self.engine
        match body:
            case poll.Receive():
                await self._receive(body)
                return None
            case poll.CatchUp():
                await self._catch_up(body)
                return None
            case poll.Verify():
                await work.do(0.02)
                attempt = self._check_parts(body.round_id)
                return replace(engine.carry_out(body), digest=attempt)
            case poll.Commit():
                if engine.staged_round is not None:
                    await work.do(0.03)
            case poll.Connect() | poll.Drop():
                await work.do(0.01)
        before = engine.version
        value = engine.carry_out(body)
        if engine.version != before:
            weights = self._parts[0][0]
            if isinstance(body, poll.Commit) and body.keep is not None:
                store = self._store(body.keep, weights)
                self._storing = asyncio.get_running_loop().create_task(store)
            self._live_now(weights)
        return value

    async def _receive(self, body: poll.Receive) -> None:
        engine = self.engine
        if engine.receiving_round != body.round_id:
            self._parts = []
        engine.carry_out(body)
        await self._work.do(0.15)
        payload = body.payload
        assert isinstance(payload, dict)
        part = (str(payload["attempt"]), int(payload["part"]), int(payload["parts"]))  # type: ignore[arg-type]
        if engine.receiving_round != body.round_id:
            return  # dropped meanwhile
        if self._work.flip and self._work.rng.random() < self._work.flip:
            raise PayloadRejected("a tensor's digest differs from the one that was stated")
        if self._parts and (part[0] != self._parts[0][0] or part in self._parts):
            raise PayloadRejected("a tensor of another update, or one that came twice")
        self._parts.append(part)

    def _check_parts(self, round_id: int) -> str:
        """The attempt whose parts are all there."""
        attempt, _, parts = self._parts[0] if self._parts else ("", 0, -1)
        if self.engine.receiving_round == round_id and len(self._parts) != parts:
            raise PayloadRejected(f"{len(self._parts)} of {parts} tensors came")
        return attempt

    async def _catch_up(self, body: poll.CatchUp) -> None:
        try:
            weights = self._read(body.stored.path, body.stored.version)
        except OSError as error:
            raise PayloadRejected(str(error)) from error
        self.engine.loading_version = body.stored.version
        await self._work.do(0.5)
        self.engine.loading_version = None
        self.engine.carry_out(body)
        self._live_now(weights)

    async def _store(self, body: poll.WriteVersion, weights: str) -> None:
        """As on a file system without locks: all of them write, and the first one's stays."""
        engine = self.engine
        while engine.retained_version == body.version:
            await self._work.do(1.0)
            try:
                path, problem = self._write(body.version, weights), ""
                engine.retained_version = None
            except OSError as error:
                path, problem = "", str(error)
                await asyncio.sleep(5.0)
            engine.store_result = poll.StoreResult(
                version=body.version, label=body.label, path=path, problem=problem
            )

    def _live_now(self, weights: str) -> None:
        self._went_live(self.version, weights)

    # -- requests -----------------------------------------------------------------------------

    async def generate(self, seconds: float) -> Answer:
        await self._until(lambda: self.generates)
        self.engine.running += 1
        try:
            first = self.version
            await asyncio.sleep(seconds)
            await self._until(lambda: self._continues)
            return Answer(first=first, last=self.version)
        finally:
            self.engine.running -= 1

    async def _until(self, ready: Callable[[], bool]) -> None:
        async with self.running:
            await self.running.wait_for(lambda: ready() or self.stopped)
        if self.stopped:
            raise EngineFailed("the engine is stopped")
