"""`staging: none`: vLLM's own transfer engines load into the live model, inside a pause.

    RECEIVE   the first payload pauses the scheduler; from then on the weights are partially updated
    VERIFY    loading ends; the digest of the live parameters stands for the version
    COMMIT    sets the version and resumes (after RELEASE, if all replicas swap together)
    DROP      fails the replica once a payload was received: the old weights are gone

From files, RECEIVE only compares digests; VERIFY pauses and loads the directory. vLLM's publishers state no
digests, so replicas are compared with each other only, and nothing is retained for the store.
"""

import asyncio
import time
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import JsonValue

from deployments.protocol import poll
from deployments.protocol.engine_state import InFlight
from deployments.protocol.errors import PayloadRejected
from deployments.replica.member import EngineMember, StagedMember
from deployments.replica.replica_engine import ReplicaEngine
from deployments.replica.scoring import Proof
from deployments.replica.server_arguments import EngineSpec
from deployments.weights.staging.staged_update import compare
from deployments.weights.store.checkpoint_files import MISTRAL
from deployments.weights.store.file_read import FileRead
from deployments.weights.store.hub import cached, schema_of
from deployments.weights.wire.checkpoint_schema import join_reasons, mismatches, repeated
from deployments.weights.wire.chunk_layout import parse
from deployments.weights.wire.digest import inspect

Offered = dict[str, tuple[torch.dtype, tuple[int, ...]]]
CHECKS = (
    poll.Check.NAMES,
    poll.Check.SHAPES,
    poll.Check.DTYPES,
    poll.Check.COMPLETE,
)  # run on the announced tensors


class NativeMember(EngineMember):
    """`one_payload`: a version is one payload, so a missing tensor is found before the first byte."""

    updates_in_place = True

    def __init__(self, engine: ReplicaEngine, spec: EngineSpec, *, one_payload: bool) -> None:
        super().__init__(engine)
        arguments = spec.arguments
        self._model = cached(spec.model, arguments.get("revision"), arguments.get("download_dir"))
        self._expected = schema_of(
            self._model, arguments.get("load_format", "auto"), of_hub=str(self._model) != spec.model
        )
        self._one_payload = one_payload
        self._receiving: int | None = None
        self._loaded: int | None = None
        self._offered: Offered = {}
        self._described: JsonValue = {}
        self._reading: FileRead | None = None
        self._directory: str | None = None
        self._in_flight = InFlight.KEEP
        self._pausing = False  # held, nothing loaded yet; later the commit ends the hold
        self._paused_at = 0.0
        self._stage_s = 0.0

    async def interrupt(self) -> None:
        """Ends the wait for a file; vLLM's wait for a peer cannot be interrupted."""
        if self._reading is not None:
            self._reading.abort()

    async def _execute(self, body: poll.Body) -> poll.Value:
        match body:
            case poll.CatchUp():
                self._check_unchanged()
            case poll.Release() if self.partially_updated:
                return None
        return await super()._execute(body)

    async def connect(self, body: poll.Connect) -> None:
        self._described = {}
        await self._engine.workers("init_weight_transfer_engine", init_info=dict(body.init_info))
        await self._engine.workers("native_check_connected")

    async def receive(self, body: poll.Receive) -> None:
        """Load one payload into the live model. Raises PayloadRejected: it does not fit; nothing was loaded.
        After any other error the weights are partially updated."""
        if self._receiving != body.round_id:
            self._check_unchanged()
            self._receiving, self._offered, self._stage_s = body.round_id, {}, 0.0
            self._directory, self._reading = None, None
            self._in_flight = body.in_flight
        if isinstance(body.payload, poll.FilePart):
            await self._compare(body.payload)
            return
        payload = body.payload
        if self._one_payload and isinstance(payload, dict) and payload.get("names") == []:
            # vLLM 0.33's trainer describes its tensors again only if they have changed.
            payload = self._described
        offered = _tensors_of(payload)
        self._refuse(repeated(self._offered, offered))
        self._check(offered, complete=self._one_payload)
        self._described = payload
        if not self.partially_updated:
            await self._hold()
            await self._engine.workers("start_weight_update")
        begin = time.perf_counter()
        await self._engine.workers("native_update", payload=payload)
        self._stage_s += time.perf_counter() - begin
        self._offered |= offered

    async def verify(self, body: poll.Verify) -> poll.Staged:
        if self._receiving != body.round_id or not (self.partially_updated or self._directory):
            raise PayloadRejected(f"round {body.round_id} has brought no payload")
        self._check(self._offered, complete=True)
        begin = time.perf_counter()
        if self._directory is None:
            await self._engine.workers("finish_weight_update")
        else:
            await self._hold()
            await self._engine.workers("load_checkpoint", path=self._directory)
        digests = await self._engine.workers("native_digest")
        self._loaded = body.round_id
        return poll.Staged(
            digest=",".join(digests),
            checks=() if self._expected is None else CHECKS,
            size_bytes=sum(dtype.itemsize * prod(shape) for dtype, shape in self._offered.values()),
            stage_s=self._stage_s,
            verify_s=time.perf_counter() - begin,
        )

    async def commit(self, body: poll.Commit) -> poll.Swapped:
        """Idempotent."""
        if not self.partially_updated and self._engine.version == body.version:
            return poll.Swapped(swap_s=0.0, gap_s=0.0)
        if self._loaded != body.round_id:
            raise RuntimeError(f"round {body.round_id} is not verified; loaded is {self._loaded}")
        begin = time.perf_counter()
        await self._engine.reset_caches(recompute=body.kv_cache is poll.KvCache.RECOMPUTE)
        await self._engine.llm.engine_core.set_weight_version_async(str(body.version))
        self._engine.version = body.version
        self.partially_updated, self.staged_round, self._receiving = False, None, None
        self._loaded = None
        await self._engine.end_drain(poll.drain_of_round(body.round_id))
        if not body.hold:
            await self._engine.release()
        end = time.perf_counter()
        return poll.Swapped(swap_s=end - begin, gap_s=end - self._paused_at)

    async def drop(self, body: poll.Drop) -> None:
        """Resumes if the round paused the engine."""
        self._check_unchanged()
        self._receiving = None
        if self._pausing:
            self._pausing = False
            await self._engine.release()

    def _check_unchanged(self) -> None:
        if self.partially_updated:
            raise RuntimeError("weights are a mixture of two versions ('staging: none' cannot undo)")

    async def _compare(self, part: poll.FilePart) -> None:
        """The engine keeps generating."""
        await self._check_reloadable()
        if any(Path(part.directory).glob(f"{MISTRAL}*.safetensors")):
            raise PayloadRejected(
                f"{part.directory} has {MISTRAL}*.safetensors, which vLLM would load instead of the files "
                "that are compared; remove them"
            )
        begin = time.perf_counter()
        self._reading = FileRead(part, self._model, torch.device("cpu"))
        try:
            offered = await asyncio.to_thread(_compared, self._reading)
        except ValueError as error:
            raise PayloadRejected(str(error)) from error
        self._refuse(repeated(self._offered, offered))
        self._check(offered, complete=False)
        self._stage_s += time.perf_counter() - begin
        self._offered |= offered
        self._directory = part.directory

    async def _hold(self) -> None:
        self._paused_at = time.perf_counter()
        self._pausing |= not self._engine.held  # an earlier commit's hold has its own RELEASE
        self._engine.held = True  # a user's resume must not generate with mixed weights
        # `wait` was drained before.
        mode = InFlight.ABORT if self._in_flight is InFlight.ABORT else InFlight.KEEP
        await self._engine.llm.engine_core.pause_scheduler_async(mode=mode.value, clear_cache=False)
        self.partially_updated, self.staged_round, self._pausing = True, self._receiving, False

    def _check(self, offered: Offered, *, complete: bool) -> None:
        if self._expected is not None:
            self._refuse(mismatches(self._expected, offered, complete=complete))

    def _refuse(self, problems: list[str]) -> None:
        if problems:
            reason = join_reasons(problems)
            raise RuntimeError(reason) if self.partially_updated else PayloadRejected(reason)


def member_of(engine: ReplicaEngine, spec: EngineSpec) -> EngineMember:
    member: EngineMember = (
        StagedMember(engine)
        if spec.staging != "none"
        else NativeMember(engine, spec, one_payload=spec.backend == "nccl")
    )
    member.proof = Proof(engine, spec.proof_sequences)
    return member


def _compared(reading: FileRead) -> Offered:
    offered: Offered = {}
    for received in reading.chunks():
        found = inspect(received.read())
        columns = torch.stack((received.sent, found.digests, found.nonfinite))
        compare([*received.chunk.offered], *columns.numpy().view(np.uint64))
        offered |= received.chunk.offered
    return offered


def _tensors_of(payload: JsonValue) -> Offered:
    first: Any = payload[0] if isinstance(payload, list) else payload
    try:
        tensors = parse(first["names"], first["dtype_names"], first["shapes"])
    except (KeyError, TypeError, ValueError) as error:
        raise PayloadRejected(f"expected names, dtype_names and shapes of the tensors: {error}") from error
    return {name: (dtype, shape) for name, dtype, shape in tensors}
