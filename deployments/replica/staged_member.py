"""Staged updates: received while the engine generates, swapped between two steps."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from pydantic import JsonValue

from deployments.host.logs import serve_logger
from deployments.protocol.engine_state import Disconnect
from deployments.protocol.errors import PayloadRejected, TransferFailed
from deployments.protocol.poll import (
    Check,
    Commit,
    Connect,
    Drop,
    FilePart,
    Forget,
    Outcome,
    Receive,
    RunOperation,
    Staged,
    StoreResult,
    Swapped,
    Verify,
    WriteVersion,
)
from deployments.replica.host_store import HostStore
from deployments.replica.member import EngineMember
from deployments.replica.replica_engine import ReplicaEngine
from deployments.weights.staging.worker_reports import StagingState, from_wire, to_wire

WAIT_S = 0.1  # a call beside the engine's own waits in the worker for so long
STAGING_POLL_S = 0.005  # other calls do not: each delays a decoding step
STORE_POLL_S = 0.5
STORE_CALL_S = 30.0

logger = serve_logger()


class StagedMember(EngineMember):
    def __init__(self, engine: ReplicaEngine) -> None:
        super().__init__(engine)
        self._receiving: int | None = None  # the round whose payloads the workers stage
        self._payloads = 0
        self._leftover = False  # the workers may hold an update
        self._retaining: int | None = None  # the version that this update is retained as
        self._states: list[StagingState] = []  # of the workers, after the last payload
        self._watching: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None  # the loop keeps no reference

    @property
    def is_writing(self) -> bool:
        return self._watching is not None and not self._watching.done()

    async def interrupt(self) -> None:
        await self._engine.workers("staging_drop")

    async def connect(self, body: Connect) -> None:
        """Join the transfer group; raises TransferFailed if another member does not."""
        await self._discard_leftover()  # a later drop would end the new group's waits, too
        await self._engine.workers("init_weight_transfer_engine", init_info=dict(body.init_info))
        await self._until_received(1)

    async def receive(self, body: Receive) -> None:
        begins = self._receiving != body.round_id
        self.staged_round = None
        if begins:
            await self._discard_leftover()
            self._receiving, self._payloads, self._leftover = body.round_id, 0, True
            self._retaining = body.retain_version
        share = self._engine.staging_share if self._engine.busy else 1.0
        # One call also begins the update: each call to the workers delays a decoding step.
        options = {"share": share, "begins": begins, "retain_version": self._retaining}
        if isinstance(body.payload, FilePart):
            await self._engine.workers("staging_read", part=to_wire(body.payload), **options)
        else:
            await self._engine.workers("staging_receive", payload=body.payload, **options)
        self._payloads += 1
        await self._until_received(self._payloads)

    async def _until_received(self, payloads: int) -> None:
        """Until every worker has staged so many payloads. Raises what went wrong at one."""
        calls, received = self._engine.calls, False
        while not received:
            wait_s = WAIT_S if calls.direct else 0.0
            answers = await calls("staging_progress", wait_s=wait_s)
            self._states = [from_wire(StagingState, answer) for answer in answers]
            received = all(state.payloads_done >= payloads for state in self._states)
            if not received and not wait_s:
                await asyncio.sleep(STAGING_POLL_S)
        raise_failure(self._states)

    async def verify(self, body: Verify) -> Staged:
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
        checks = tuple(check for check in Check if all(check in state.checks for state in states))
        return Staged(
            digest=states[0].digest,
            checks=checks,
            drafter=states[0].drafter,
            size_bytes=sum(state.size_bytes for state in states),
            stage_s=max(state.stage_s for state in states),
            verify_s=max(state.verify_s for state in states),
        )

    async def commit(self, body: Commit) -> Swapped:
        """Idempotent: a restarted controller repeats it."""
        if self._receiving is None and self._engine.version == body.version:
            return Swapped(swap_s=0.0, gap_s=0.0)
        if self.staged_round != body.round_id:
            raise RuntimeError(f"round {body.round_id} is not verified; staged is {self.staged_round}")
        swapped = await self._engine.commit(body)
        self.staged_round = self._receiving = None
        self._leftover = False
        self.retained_version = self._retaining
        if body.keep is not None and self.host_store is not None:
            self._keeping = asyncio.create_task(self._keep(body.keep, self.host_store))
        return swapped

    async def _keep(self, body: WriteVersion, store: HostStore) -> None:
        try:
            if await asyncio.to_thread(store.prepare, body.fleet_id):
                await self.write_version(replace(body, directory=str(store.directory)))
        except Exception as error:  # of any kind: other hosts have it, and this replica serves it
            logger.warning("version %d is not kept on this host: %s", body.version, error)

    async def drop(self, body: Drop) -> None:
        """Discard what is staged. If the workers cannot, the next update tries it again before it begins."""
        self._leftover = True
        try:
            await self._discard_leftover()
        except Exception as error:  # live weights are untouched
            if self._engine.dead:
                raise
            logger.warning("a staged update is not discarded: %s: %s", type(error).__name__, error)

    async def call(self, body: RunOperation) -> JsonValue:
        if isinstance(body.operation, Disconnect):
            await self._discard_leftover()  # vLLM keeps the connection while an update is active
        return await super().call(body)

    async def _discard_leftover(self) -> None:
        """Drop a round whose controller is gone. No report named it while it was being received."""
        if self._leftover:
            self._receiving = self.staged_round = None
            await self._engine.workers("staging_drop")
            self._leftover = False

    async def write_version(self, body: WriteVersion) -> None:
        self.store_result = None
        await self._engine.workers("staging_store", body=to_wire(body))
        if self._watching is not None:
            self._watching.cancel()
        self._watching = asyncio.create_task(self._watch_write(body.version))

    async def _watch_write(self, version: int) -> None:
        while self.store_result is None or self.store_result.version < version:
            await asyncio.sleep(STORE_POLL_S)
            try:
                async with asyncio.timeout(STORE_CALL_S):  # not wait_for, which can swallow a cancellation
                    answers = await self._engine.calls("staging_store_state")
            except TimeoutError:  # busy or hung; the next instruction finds out
                continue
            ended = [from_wire(StoreResult, answer) for answer in answers if answer is not None]
            if ended:
                self.store_result = ended[0]

    async def forget(self, body: Forget) -> None:
        await self._engine.workers("staging_forget", version=body.version)
        if self.retained_version is not None and self.retained_version <= body.version:
            self.retained_version = None


def raise_failure(states: Sequence[StagingState]) -> None:
    for state in states:
        match state.outcome:
            case Outcome.REJECTED:
                raise PayloadRejected(state.message)
            case Outcome.TRANSFER_FAILED:
                raise TransferFailed(state.message, state.missing_ranks)
            case Outcome.REPLICA_FAILED:
                raise RuntimeError(state.message)
            case Outcome.DONE:
                pass
