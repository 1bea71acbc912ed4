"""Runs the controller's instructions on an engine; subclasses implement staging."""

import asyncio
from abc import ABC, abstractmethod

from pydantic import JsonValue

from deployments.host.logs import serve_logger
from deployments.protocol.adapters import LoadAdapter, SetAdapters
from deployments.protocol.engine_state import (
    MEMORY_TAGS,
    AbortRequests,
    Disconnect,
    IsPaused,
    IsSleeping,
    Operation,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    SleepTag,
    WakeUp,
    WeightChecksums,
)
from deployments.protocol.errors import PayloadRejected, TransferFailed
from deployments.protocol.poll import (
    BEFORE_COMMIT,
    Body,
    CatchUp,
    Commit,
    Connect,
    DesiredReplicas,
    Directive,
    Drain,
    Drop,
    EndDrain,
    InitialWeights,
    Receive,
    Release,
    Report,
    RunOperation,
    Staged,
    StoreResult,
    Swapped,
    Value,
    Verify,
)
from deployments.protocol.routing import ReplicaEndpoint
from deployments.replica.host_store import HostStore, require_version
from deployments.replica.replica_engine import ReplicaEngine
from deployments.replica.scoring import Proof
from deployments.weights.wire.checkpoint_schema import join_reasons


async def carry_out(engine: ReplicaEngine, operation: Operation) -> JsonValue:
    match operation:
        case Pause():
            await engine.pause(operation)
        case Resume():
            await engine.resume()
        case IsPaused():
            return bool(await engine.llm.is_paused())
        case Sleep():
            await engine.sleep(operation)
        case WakeUp():
            await engine.wake_up(operation)
            return not engine.asleep & MEMORY_TAGS  # as vLLM's executor
        case IsSleeping():
            return bool(await engine.llm.is_sleeping())
        case ResetPrefixCache():
            return bool(
                await engine.llm.reset_prefix_cache(
                    reset_running_requests=operation.reset_running_requests,
                    reset_connector=operation.reset_connector,
                )
            )
        case AbortRequests():
            return await _abort_requests(engine, operation)
        case WeightChecksums():
            return [dict(each) for each in await engine.llm.compute_weight_checksums()]
        case Disconnect():
            await engine.workers("shutdown_weight_transfer_engine")
    return None


async def _abort_requests(engine: ReplicaEngine, operation: AbortRequests) -> int:
    if operation.request_ids:
        await engine.llm.abort(list(operation.request_ids))
        return len(operation.request_ids)
    processor = engine.llm.output_processor
    running = [*processor.request_states, *processor.parent_requests]
    await engine.llm.abort(running, internal=True)
    return len(running)


DEATH_POLL_S = 0.1
ENDS_PROOF = (Commit, CatchUp, Pause, Sleep, AbortRequests)

logger = serve_logger()


class EngineMember(ABC):
    updates_in_place = False

    def __init__(self, engine: ReplicaEngine) -> None:
        self._engine = engine
        self.proof = Proof(engine, 0)
        self.staged_round: int | None = None
        self.partially_updated = False
        self.retained_version: int | None = None
        self.loading_version: int | None = None
        self.initial: InitialWeights | None = None
        self.store_result: StoreResult | None = None
        self.store: HostStore | None = None
        self.endpoint: ReplicaEndpoint | None = None
        self.admitted = False
        self.fenced: str | None = None
        self.leaving = self.drained = self.may_leave = False
        self.desired = DesiredReplicas()
        self.changed = asyncio.Condition()  # notified when admission or the version may have changed

    @property
    def version(self) -> int:
        return self._engine.version

    def report(self, replica_id: str, incarnation: str) -> Report:
        return Report(
            replica_id=replica_id,
            incarnation=incarnation,
            version=self._engine.version,
            world_size=self._engine.world_size,
            staged_round=self.staged_round,
            retained_version=self.retained_version,
            loading_version=self.loading_version,
            initial=self.initial,
            store_result=self.store_result,
            endpoint=self.endpoint,
            updates_in_place=self.updates_in_place,
            draining=self._engine.drains.state,
            adapters=self._engine.adapters.held,
            condition=self._engine.condition,
            scores=self.proof.report(),
            leaving=self.leaving,
            drained=self.drained,
        )

    async def execute(self, body: Body) -> Value:
        if isinstance(body.operation if isinstance(body, RunOperation) else body, ENDS_PROOF):
            self.proof.cancel()
        try:
            value = await self._execute(body)
        except (PayloadRejected, TransferFailed):
            raise
        except Exception as error:  # bad payload or short host: live weights are untouched
            touches_none = isinstance(body, (*BEFORE_COMMIT, LoadAdapter)) and not self.partially_updated
            if not touches_none or self._engine.dead:
                raise
            raise PayloadRejected(f"{type(error).__name__}: {error}") from error
        async with self.changed:
            self.changed.notify_all()
        self.proof.begin_if_due()
        return value

    @property
    def is_writing(self) -> bool:
        return False

    @abstractmethod
    async def interrupt(self) -> None:
        """End the running instruction's wait."""

    def on_directive(self, directive: Directive) -> None:
        self.fenced = directive.fenced
        self.may_leave, self.desired = directive.may_leave, directive.desired
        self.admitted = directive.admitted and directive.fenced is None
        self.proof.on_reported()
        if directive.fenced is None:
            self.proof.begin_if_due()

    async def fence(self, reason: str) -> None:
        self.fenced, self.admitted = reason, False
        self.proof.cancel()
        logger.warning("fenced, stopping the engine: %s", reason)
        async with self.changed:
            self.changed.notify_all()
        await self._engine.stop()

    async def died(self) -> str:
        while not self._engine.dead:
            await asyncio.sleep(DEATH_POLL_S)
        return "its engine has died"

    async def _execute(self, body: Body) -> Value:
        match body:
            case Connect():
                await self.connect(body)
            case Receive():
                self._check_awake()
                await self.receive(body)
            case Verify():
                return await self.verify(body)
            case Drain():
                await self._engine.drain(body.drain_id)
            case EndDrain():
                await self._engine.end_drain(body.drain_id)
            case Commit():
                return await self.commit(body)
            case Release():
                await self._engine.release()
            case Drop():
                await self.drop(body)
            case CatchUp():
                await self._load(body)
            case RunOperation():
                return await self.call(body)
            case LoadAdapter():
                self._check_awake()
                return await self._engine.adapters.load(body.adapter)
            case SetAdapters():
                await self._engine.adapters.make_live(body.live, body.keep)
        return None

    async def call(self, body: RunOperation) -> JsonValue:
        return await carry_out(self._engine, body.operation)

    async def _load(self, body: CatchUp) -> None:
        """Raises PayloadRejected: unreadable or not loadable into a running engine, which is unchanged."""
        await self._check_reloadable()
        self.loading_version = body.version
        try:
            reading = await asyncio.to_thread(require_version, body)
        except (OSError, ValueError) as error:
            self.loading_version = None
            raise PayloadRejected(str(error)) from error
        try:
            await self._engine.load(body.path, body.version)
        finally:
            self.loading_version = None
            reading.close()

    async def _check_reloadable(self) -> None:
        refusals = [each for each in await self._engine.workers("reload_refusal") if each is not None]
        if refusals:
            raise PayloadRejected(join_reasons(refusals))

    def _check_awake(self) -> None:
        if SleepTag.WEIGHTS in self._engine.asleep:
            raise PayloadRejected("weights are offloaded (sleep mode); call /wake_up?tags=weights first")

    @abstractmethod
    async def connect(self, body: Connect) -> None: ...

    @abstractmethod
    async def receive(self, body: Receive) -> None: ...

    @abstractmethod
    async def verify(self, body: Verify) -> Staged: ...

    @abstractmethod
    async def commit(self, body: Commit) -> Swapped: ...

    @abstractmethod
    async def drop(self, body: Drop) -> None: ...
