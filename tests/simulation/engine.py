"""An engine without tensors: what a replica holds, how long its work takes, and how it fails.

Weights are the name of the publisher's attempt that made them. A payload is one part of an attempt; parts of
two attempts, or too few parts, are no weights.
"""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext

from deployments.protocol.adapters import DropAdapter, LoadAdapter, ReceiveAdapter, SetAdapters
from deployments.protocol.engine_state import (
    Disconnect,
    EngineState,
    InFlight,
    Pause,
    Resume,
    Sleep,
    SleepTag,
    WakeUp,
    apply,
    asleep,
    is_paused,
)
from deployments.protocol.errors import PayloadRejected, TransferFailed
from deployments.protocol.poll import (
    Body,
    CatchUp,
    Commit,
    Connect,
    Directive,
    Drain,
    Draining,
    Drop,
    EndDrain,
    Forget,
    Receive,
    Release,
    Report,
    RunOperation,
    Staged,
    StoreResult,
    Swapped,
    Value,
    Verify,
    WriteVersion,
    drain_of_round,
)
from tests.simulation.adapters.engine import KINDS, SimAdapters
from tests.simulation.work import Answer, EngineFailed, Mortal, Work


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
        lora: SimAdapters | None = None,
    ) -> None:
        super().__init__()
        self.version, self.weights = version, weights
        self.staged_round: int | None = None
        self.partially_updated = False
        self.loading_version: int | None = None
        self.retained_version: int | None = None
        self.store_result: StoreResult | None = None
        self.admitted = False
        self.lora = SimAdapters(work) if lora is None else lora
        self.fenced: str | None = None
        self.changed = asyncio.Condition()
        self.condition: EngineState = ()
        self.held = self.hangs = False
        self._work = work
        self._went_live = went_live
        self._write, self._read = write, read
        self._receiving: int | None = None
        self._parts: list[tuple[str, int, int]] = []
        self._retaining: int | None = None
        self._retained = ""
        self.uncertain_since: float | None = None  # its weights may be a mixture
        self._drains: dict[str, None] = {}
        self._requests = 0
        self.fails: Callable[[Body], bool] = lambda body: False  # for faults that meet another one
        self._interrupted = asyncio.Event()
        went_live(version, weights)

    @property
    def generates(self) -> bool:
        """Whether a request that comes now would be computed with `version`."""
        return not (self._drains or self._pauses)

    def report(self, replica_id: str, incarnation: str) -> Report:
        draining = Draining(drain_ids=tuple(self._drains), running=self._requests) if self._drains else None
        return Report(
            replica_id=replica_id,
            incarnation=incarnation,
            version=self.version,
            world_size=1,
            staged_round=self.staged_round,
            retained_version=self.retained_version,
            loading_version=self.loading_version,
            store_result=self.store_result,
            draining=draining,
            adapters=self.lora.state,
            condition=self.condition,
        )

    @property
    def _pauses(self) -> bool:
        user = is_paused(self.condition) or bool(asleep(self.condition))
        return self.held or user or self.hangs or self.stopped

    # -- MemberProtocol -----------------------------------------------------------------------------

    async def execute(self, body: Body) -> Value:
        value = await self.while_alive(self._execute(body))
        async with self.changed:
            self.changed.notify_all()
        return value

    async def interrupt(self) -> None:
        if self.hangs:
            await self.while_alive(asyncio.Event().wait())
        self._interrupted.set()
        self._parts = []

    def on_directive(self, directive: Directive) -> None:
        self.fenced = directive.fenced
        self.admitted = directive.admitted and directive.fenced is None

    async def fence(self, reason: str) -> None:
        self.fenced, self.admitted, self.stopped = reason, False, True
        async with self.changed:
            self.changed.notify_all()
        async with self.running:
            self.running.notify_all()

    # -- instructions -------------------------------------------------------------------------

    async def _execute(self, body: Body) -> Value:
        work = self._work
        if self.hangs:
            await asyncio.Event().wait()
        if self.fails(body):
            raise EngineFailed(f"{body.name} failed")
        if work.fail and work.rng.random() < work.fail:
            await work.do(0.05)
            if isinstance(body, Connect | Receive) and work.rng.random() < 0.7:
                raise TransferFailed("a peer is gone")
            if isinstance(body, Commit | CatchUp):
                self.uncertain_since = asyncio.get_running_loop().time()
            raise EngineFailed(f"{body.name} failed")
        if work.hang and work.rng.random() < work.hang:
            if work.rng.random() < 0.3:
                self.hangs = True
            if self.hangs or isinstance(body, KINDS):  # nothing interrupts the load of an adapter
                await asyncio.Event().wait()
            self._interrupted.clear()
            await self._interrupted.wait()
            raise TransferFailed("interrupted")
        match body:
            case Connect() | ReceiveAdapter():
                self._discard()
                await work.do(0.02)
            case Receive():
                await self._receive(body)
            case Verify():
                return await self._verify(body)
            case Commit():
                return await self._commit(body)
            case Drain():
                self._drains[body.drain_id] = None
            case EndDrain():
                self._drains.pop(body.drain_id, None)
                await self._may_go_on()
            case Release():
                self.held = False
                await self._may_go_on()
            case Drop():
                await work.do(0.01)
                self._discard()
            case CatchUp():
                await self._catch_up(body)
            case WriteVersion():
                await work.do(0.01)
                if self.retained_version != body.version:
                    raise EngineFailed(f"retains {self.retained_version}")
                store = self._store(body, self._retained)
                self._storing = asyncio.get_running_loop().create_task(store)
            case Forget():
                if self.retained_version is not None and self.retained_version <= body.version:
                    self.retained_version = None
            case RunOperation(operation=Disconnect()):
                self._discard()
            case RunOperation(operation=Pause() | Resume() | Sleep() | WakeUp() as operation):
                self.condition = apply(self.condition, operation)
                await self._may_go_on()
            case LoadAdapter() | SetAdapters() | DropAdapter():
                await self.lora.carry_out(body, asleep=self._weights_sleep)
        return None

    def _discard(self) -> None:
        self.staged_round = self._receiving = None
        self._parts = []

    @property
    def _weights_sleep(self) -> bool:
        return SleepTag.WEIGHTS in asleep(self.condition)

    async def _receive(self, body: Receive) -> None:
        if self._weights_sleep:
            raise PayloadRejected("its weights sleep")
        self.staged_round = None
        if self._receiving != body.round_id:
            self._receiving, self._parts = body.round_id, []
            self._retaining = body.options.retain_version
        await self._work.do(0.15)
        payload = body.payload
        assert isinstance(payload, dict)
        part = (str(payload["attempt"]), int(payload["part"]), int(payload["parts"]))  # type: ignore[arg-type]
        if self._receiving != body.round_id:
            return  # dropped meanwhile
        if self._work.flip and self._work.rng.random() < self._work.flip:
            raise PayloadRejected("a tensor's digest differs from the one that was stated")
        if self._parts and (part[0] != self._parts[0][0] or part in self._parts):
            raise PayloadRejected("a tensor of another update, or one that came twice")
        self._parts.append(part)

    async def _verify(self, body: Verify) -> Staged:
        await self._work.do(0.02)
        if self._receiving != body.round_id:
            raise PayloadRejected(f"round {body.round_id} has brought no payload")
        attempt, _, parts = self._parts[0] if self._parts else ("", 0, -1)
        if len(self._parts) != parts:
            raise PayloadRejected(f"{len(self._parts)} of {parts} tensors came")
        self.staged_round = body.round_id
        return Staged(digest=attempt, compared=True, size_bytes=1, stage_s=0.0, verify_s=0.0)

    async def _commit(self, body: Commit) -> Swapped:
        if self._receiving is None and self.version == body.version:
            return Swapped(swap_s=0.0, gap_s=0.0)
        if self.staged_round != body.round_id:
            raise EngineFailed(f"round {body.round_id} is not verified")
        if self._weights_sleep:
            raise EngineFailed("no memory to swap into")
        await self._work.do(0.03)
        if self._receiving != body.round_id:
            raise EngineFailed("finish_weight_update called without start_weight_update")
        if body.in_flight is InFlight.WAIT and self._requests:
            raise EngineFailed("requests run although they were waited for")
        self._drains.pop(drain_of_round(body.round_id), None)
        self.held = body.hold
        self.version, self.weights = body.version, self._parts[0][0]
        self.staged_round = self._receiving = None
        self.retained_version, self._retained = self._retaining, self.weights
        self._live_now()
        await self._may_go_on()
        return Swapped(swap_s=0.01, gap_s=0.02)

    async def _catch_up(self, body: CatchUp) -> None:
        try:
            weights = self._read(body.path, body.version)
        except OSError as error:
            raise PayloadRejected(str(error)) from error
        if self._weights_sleep:
            raise EngineFailed("no memory to load into")
        self.loading_version = body.version
        await self._work.do(0.5)
        self.loading_version, self.held = None, False
        self.version, self.weights = body.version, weights
        self._live_now()
        await self._may_go_on()

    async def _store(self, body: WriteVersion, weights: str) -> None:
        await self._work.do(1.0)
        try:
            path, problem = self._write(body.version, weights), ""
        except OSError as error:
            path, problem = "", str(error)
        self.store_result = StoreResult(version=body.version, label=body.label, path=path, problem=problem)

    def _live_now(self) -> None:
        self._went_live(self.version, self.weights)
        self.lora.forget()

    async def _may_go_on(self) -> None:
        async with self.running:
            self.running.notify_all()

    # -- requests -----------------------------------------------------------------------------

    async def generate(self, seconds: float, name: str | None = None) -> Answer:
        """Raises NotFound if no adapter has this name."""
        with nullcontext() if name is None else self.lora.using(name) as compute:
            await self._until(lambda: self.generates)
            self._requests += 1
            try:
                first, tokens = self.version, [compute()] if compute else []
                await asyncio.sleep(seconds)
                await self._until(lambda: not self._pauses)
                tokens += [compute()] if compute else []
                return Answer(first=first, last=self.version, tokens=tuple(tokens))
            finally:
                self._requests -= 1

    async def _until(self, ready: Callable[[], bool]) -> None:
        async with self.running:
            await self.running.wait_for(lambda: ready() or self.stopped)
        if self.stopped:
            raise EngineFailed("the engine is stopped")
