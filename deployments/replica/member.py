"""Runs the controller's instructions on an engine.

`StagedMember` receives while the engine generates and swaps between two steps; see also `native_member`.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress

from pydantic import JsonValue

from deployments.host.logs import serve_logger
from deployments.protocol import engine_state, poll
from deployments.protocol.adapters import LoadAdapter, SetAdapters
from deployments.protocol.errors import PayloadRejected, TransferFailed
from deployments.protocol.routing import ReplicaEndpoint
from deployments.replica.host_store import HostStore
from deployments.replica.replica_engine import ReplicaEngine
from deployments.replica.scoring import Proof
from deployments.weights.staging.staged_update import StagingState, from_wire, to_wire
from deployments.weights.store.version_fetcher import require_version
from deployments.weights.wire.checkpoint_schema import join_reasons

DEATH_POLL_S = 0.1
WAIT_S = 0.1  # limit of a call's wait in the worker, beside the engine's own
STAGING_POLL_S = 0.005  # polls through vLLM: each delays a decoding step
STORE_POLL_S = 0.5
STORE_CALL_S = 30.0
LOCK_POLL_S = 2.0  # while another replica writes
STORE_RETRY_S = 30.0
WRITE_S = 600.0  # then another replica may also write: this disk may hang
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
                return await self.call(body.operation)
            case LoadAdapter():
                self._check_awake()
                return await self._engine.adapters.load(body.adapter)
            case SetAdapters():
                await self._engine.adapters.make_live(body.live, body.keep)
        return None

    async def call(self, operation: engine_state.Operation) -> JsonValue:
        engine = self._engine
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
            case engine_state.AbortRequests(request_ids=ids):
                if ids:
                    await engine.llm.abort(list(ids))
                    return len(ids)
                processor = engine.llm.output_processor
                running = [*processor.request_states, *processor.parent_requests]
                await engine.llm.abort(running, internal=True)
                return len(running)
            case engine_state.WeightChecksums():
                return [dict(each) for each in await engine.llm.compute_weight_checksums()]
            case engine_state.Disconnect():
                await engine.workers("shutdown_weight_transfer_engine")
        return None

    async def _load(self, body: poll.CatchUp) -> None:
        """Raises PayloadRejected: unreadable or not loadable into a running engine, which is unchanged."""
        await self._check_reloadable()
        self.loading_version = body.stored.version
        try:
            reading = await asyncio.to_thread(require_version, body.stored)
        except (OSError, ValueError) as error:
            self.loading_version = None
            raise PayloadRejected(str(error)) from error
        try:
            await self._engine.load(body.stored.path, body.stored.version)
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


class StagedMember(EngineMember):
    def __init__(self, engine: ReplicaEngine) -> None:
        super().__init__(engine)
        self._receiving: int | None = None
        self._payloads = 0
        self._leftover = False
        self._retaining: int | None = None  # as which this update is retained
        self._states: list[StagingState] = []
        self._unstored: poll.WriteVersion | None = None
        self._committed = asyncio.Event()  # since the last attempt to store
        self._keeping: asyncio.Task[None] | None = None

    @property
    def is_writing(self) -> bool:
        unstored, last = self._unstored, self.store_result
        return unstored is not None and (last is None or last.version != unstored.version)

    async def interrupt(self) -> None:
        await self._engine.workers("staging_drop")

    async def connect(self, body: poll.Connect) -> None:
        """Raises TransferFailed if another member does not join."""
        await self._discard_leftover()  # a later drop would end the new group's waits too
        await self._engine.workers("init_weight_transfer_engine", init_info=dict(body.init_info))
        await self._until_received(1)

    async def receive(self, body: poll.Receive) -> None:
        begins = self._receiving != body.round_id
        self.staged_round = None
        if begins:
            await self._discard_leftover()
            self._receiving, self._payloads, self._leftover = body.round_id, 0, True
            self._retaining = body.retain_version
        share = self._engine.staging_share if self._engine.busy else 1.0
        # One call also begins the update: each call to the workers delays a decoding step.
        options = {"share": share, "begins": begins, "retain_version": self._retaining}
        if isinstance(body.payload, poll.FilePart):
            await self._engine.workers("staging_read", part=to_wire(body.payload), **options)
        else:
            await self._engine.workers("staging_receive", payload=body.payload, **options)
        self._payloads += 1
        await self._until_received(self._payloads)

    async def _until_received(self, payloads: int) -> None:
        calls, received = self._engine.calls, False
        while not received:
            wait_s = WAIT_S if calls.direct else 0.0
            answers = await calls("staging_progress", wait_s=wait_s)
            self._states = [from_wire(StagingState, answer) for answer in answers]
            received = all(state.payloads_done >= payloads for state in self._states)
            if not received and not wait_s:
                await asyncio.sleep(STAGING_POLL_S)
        raise_failure(self._states)

    async def verify(self, body: poll.Verify) -> poll.Staged:
        if self._receiving != body.round_id:
            raise PayloadRejected(f"round {body.round_id} has brought no payload")
        states = self._states
        if not all(state.digest for state in states):
            answers = await self._engine.workers("staging_verify")
            states = [from_wire(StagingState, answer) for answer in answers]
        raise_failure(states)
        digests = {state.digest for state in states}
        if len(digests) > 1:
            raise RuntimeError(f"workers of one replica staged different tensors: {sorted(digests)}")
        self.staged_round = body.round_id
        checks = tuple(check for check in poll.Check if all(check in state.checks for state in states))
        return poll.Staged(
            digest=states[0].digest,
            checks=checks,
            drafter=states[0].drafter,
            size_bytes=sum(state.size_bytes for state in states),
            stage_s=max(state.stage_s for state in states),
            verify_s=max(state.verify_s for state in states),
        )

    async def commit(self, body: poll.Commit) -> poll.Swapped:
        """Idempotent: a restarted controller repeats it."""
        if self._receiving is None and self._engine.version == body.version:
            return poll.Swapped(swap_s=0.0, gap_s=0.0)
        if self.staged_round != body.round_id:
            raise RuntimeError(f"round {body.round_id} is not verified; staged is {self.staged_round}")
        swapped = await self._engine.commit(body)
        self.staged_round = self._receiving = None
        self._leftover = False
        self.retained_version = self._retaining
        self._unstored = body.keep
        self._committed.set()
        if self.store is not None and body.keep is not None and (not self._keeping or self._keeping.done()):
            self._keeping = asyncio.create_task(self._keep(self.store))
        return swapped

    async def _keep(self, store: HostStore) -> None:
        """Until the retained version is in the store; takes over from a writer that exits or fails."""
        while (body := self._unstored) is not None and not self._engine.dead:
            self._committed.clear()
            try:
                result = await self._write(body, store)
                if body is self._unstored and result is not None and not result.problem:
                    await self._engine.workers("staging_forget", version=body.version)
                    self.retained_version = self._unstored = None
            except Exception as error:  # this replica serves the version in any case
                result = _result(body, problem=f"{type(error).__name__}: {error}")
            if result is not None and (body is self._unstored or not result.problem):
                self.store_result = result
            with suppress(TimeoutError):
                async with asyncio.timeout(LOCK_POLL_S if result is None else STORE_RETRY_S):
                    await self._committed.wait()

    async def _write(self, body: poll.WriteVersion, store: HostStore) -> poll.StoreResult | None:
        """None: another replica has the lock."""
        if path := await asyncio.to_thread(store.find, body):
            return _result(body, path=path)
        lock = await asyncio.to_thread(store.lock, body.fleet_id)
        if lock is None:
            return None
        written = None
        try:
            if path := await asyncio.to_thread(store.find, body):
                return _result(body, path=path)
            async with asyncio.timeout(WRITE_S):
                await self._engine.workers(
                    "staging_store", body=to_wire(body), directory=str(store.directory)
                )
                result = await self._written(body.version)
            written = None if result.problem else body
            return result
        except TimeoutError:
            raise TimeoutError(f"did not end within {WRITE_S:g} s") from None
        finally:
            await asyncio.to_thread(store.unlock, lock, written)

    async def _written(self, version: int) -> poll.StoreResult:
        while True:
            await asyncio.sleep(STORE_POLL_S)
            with suppress(TimeoutError):  # busy or hung; the next instruction finds out
                async with asyncio.timeout(STORE_CALL_S):  # not wait_for, which can swallow a cancellation
                    answers = await self._engine.calls("staging_store_state")
                    for result in [
                        from_wire(poll.StoreResult, answer) for answer in answers if answer is not None
                    ]:
                        if result.version == version:
                            return result

    async def drop(self, body: poll.Drop) -> None:
        """If the workers cannot, the next update retries before it begins."""
        self._leftover = True
        try:
            await self._discard_leftover()
        except Exception as error:  # live weights are untouched
            if self._engine.dead:
                raise
            logger.warning("a staged update is not discarded: %s: %s", type(error).__name__, error)

    async def call(self, operation: engine_state.Operation) -> JsonValue:
        if isinstance(operation, engine_state.Disconnect):
            await self._discard_leftover()  # vLLM keeps the connection while an update is active
        return await super().call(operation)

    async def _discard_leftover(self) -> None:
        """Drop a round whose controller is gone. No report named it while it was being received."""
        if self._leftover:
            self._receiving = self.staged_round = None
            await self._engine.workers("staging_drop")
            self._leftover = False


def _result(body: poll.WriteVersion, path: str = "", problem: str = "") -> poll.StoreResult:
    return poll.StoreResult(version=body.version, label=body.label, path=path, problem=problem)


def raise_failure(states: Sequence[StagingState]) -> None:
    for state in states:
        match state.outcome:
            case poll.Outcome.REJECTED:
                raise PayloadRejected(state.message)
            case poll.Outcome.TRANSFER_FAILED:
                raise TransferFailed(state.message, state.missing_ranks)
            case poll.Outcome.REPLICA_FAILED:
                raise RuntimeError(state.message)
            case poll.Outcome.DONE:
                pass
