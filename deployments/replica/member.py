"""Runs the controller's instructions on an engine; subclasses implement staging."""

import asyncio
from abc import ABC, abstractmethod

from pydantic import JsonValue

from deployments.host.logs import serve_logger
from deployments.protocol import engine_state, poll
from deployments.protocol.adapters import LoadAdapter, SetAdapters
from deployments.protocol.errors import PayloadRejected, TransferFailed
from deployments.protocol.routing import ReplicaEndpoint
from deployments.replica.host_store import HostStore
from deployments.replica.replica_engine import ReplicaEngine
from deployments.replica.scoring import Proof
from deployments.weights.store.version_fetcher import require_version
from deployments.weights.wire.checkpoint_schema import join_reasons


async def carry_out(engine: ReplicaEngine, operation: engine_state.Operation) -> JsonValue:
    match operation:
        case engine_state.Pause():
            await engine.pause(operation)
        case engine_state.Resume():
            await engine.resume()
        case engine_state.IsPaused():
            return bool(await engine.llm.is_paused())
        case engine_state.Sleep():
            await engine.sleep(operation)
        case engine_state.WakeUp():
            await engine.wake_up(operation)
            return not engine.asleep & engine_state.MEMORY_TAGS  # as vLLM's executor
        case engine_state.IsSleeping():
            return bool(await engine.llm.is_sleeping())
        case engine_state.ResetPrefixCache():
            return bool(
                await engine.llm.reset_prefix_cache(
                    reset_running_requests=operation.reset_running_requests,
                    reset_connector=operation.reset_connector,
                )
            )
        case engine_state.AbortRequests():
            return await _abort_requests(engine, operation)
        case engine_state.WeightChecksums():
            return [dict(each) for each in await engine.llm.compute_weight_checksums()]
        case engine_state.Disconnect():
            await engine.workers("shutdown_weight_transfer_engine")
    return None


async def _abort_requests(engine: ReplicaEngine, operation: engine_state.AbortRequests) -> int:
    if operation.request_ids:
        await engine.llm.abort(list(operation.request_ids))
        return len(operation.request_ids)
    processor = engine.llm.output_processor
    running = [*processor.request_states, *processor.parent_requests]
    await engine.llm.abort(running, internal=True)
    return len(running)


DEATH_POLL_S = 0.1
ENDS_PROOF = (poll.Commit, poll.CatchUp, engine_state.Pause, engine_state.Sleep, engine_state.AbortRequests)

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
        self.initial: poll.InitialWeights | None = None
        self.store_result: poll.StoreResult | None = None
        self.store: HostStore | None = None
        self.endpoint: ReplicaEndpoint | None = None
        self.admitted = False
        self.fenced: str | None = None
        self.leaving = self.drained = self.may_leave = False
        self.desired = poll.DesiredReplicas()
        self.changed = asyncio.Condition()  # notified when admission or the version may have changed

    @property
    def version(self) -> int:
        return self._engine.version

    def report(self, replica_id: str, incarnation: str) -> poll.Report:
        return poll.Report(
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

    async def execute(self, body: poll.Body) -> poll.Value:
        if isinstance(body.operation if isinstance(body, poll.RunOperation) else body, ENDS_PROOF):
            self.proof.cancel()
        try:
            value = await self._execute(body)
        except (PayloadRejected, TransferFailed):
            raise
        except Exception as error:  # bad payload or short host: live weights are untouched
            touches_none = isinstance(body, (*poll.BEFORE_COMMIT, LoadAdapter)) and not self.partially_updated
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

    def on_directive(self, directive: poll.Directive) -> None:
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

    async def _execute(self, body: poll.Body) -> poll.Value:
        match body:
            case poll.Connect():
                await self.connect(body)
            case poll.Receive():
                self._check_awake()
                await self.receive(body)
            case poll.Verify():
                return await self.verify(body)
            case poll.Drain():
                await self._engine.drain(body.drain_id)
            case poll.EndDrain():
                await self._engine.end_drain(body.drain_id)
            case poll.Commit():
                return await self.commit(body)
            case poll.Release():
                await self._engine.release()
            case poll.Drop():
                await self.drop(body)
            case poll.CatchUp():
                await self._load(body)
            case poll.RunOperation():
                return await self.call(body)
            case LoadAdapter():
                self._check_awake()
                return await self._engine.adapters.load(body.adapter)
            case SetAdapters():
                await self._engine.adapters.make_live(body.live, body.keep)
        return None

    async def call(self, body: poll.RunOperation) -> JsonValue:
        return await carry_out(self._engine, body.operation)

    async def _load(self, body: poll.CatchUp) -> None:
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
        if engine_state.SleepTag.WEIGHTS in self._engine.asleep:
            raise PayloadRejected("weights are offloaded (sleep mode); call /wake_up?tags=weights first")

    @abstractmethod
    async def connect(self, body: poll.Connect) -> None: ...

    @abstractmethod
    async def receive(self, body: poll.Receive) -> None: ...

    @abstractmethod
    async def verify(self, body: poll.Verify) -> poll.Staged: ...

    @abstractmethod
    async def commit(self, body: poll.Commit) -> poll.Swapped: ...

    @abstractmethod
    async def drop(self, body: poll.Drop) -> None: ...
