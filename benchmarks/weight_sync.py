"""Engines of the GPU benchmarks, without Ray, that a trainer process updates through a weight-sync client.

trainer process                     this process (asyncio)
our trainer engine ───── client ──► StagedMember ──► AsyncLLM        ours: staged, then a commit
vLLM's trainer engine ── client ──► StagedMember ──► AsyncLLM        wire: the same
vLLM's trainer engine ── client ──► AsyncLLM                         native: loaded inside a pause
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from app.http.ipc_handles import FIELD, refuse_or_restrict
from deployments.protocol.engine_state import InFlight
from deployments.protocol.poll import (
    Body,
    Check,
    Commit,
    Connect,
    KvCache,
    Receive,
    Staged,
    Verify,
)
from deployments.weights.wire.cuda_ipc_handles import encode_payload

TIMEOUT_S = 120.0


@dataclass(slots=True, kw_only=True)
class Times:
    """When a round began, was staged, and was live, in seconds of `time.perf_counter`."""

    begin: float = 0.0
    staged: float = 0.0
    live: float = 0.0


class Ours:
    """A replica that runs the instructions of a round: staged while it decodes, then a commit.

    Args:
        states_digests: False for vLLM's own trainer engines.
    """

    def __init__(self, engine: Any, kv_cache: KvCache = KvCache.KEEP, *, states_digests: bool = True) -> None:
        from deployments.replica.member import StagedMember

        self.engine = engine
        self._member = StagedMember(engine)
        self._states_digests = states_digests
        self.kv_cache = kv_cache
        self.version = engine.version
        self.times = Times()
        self.arrived_bytes = 0  # in the last round

    async def init_weight_transfer_engine(self, info: Mapping[str, JsonValue]) -> None:
        await self._run(Connect(init_info=info))

    async def start_weight_update(self) -> None:
        self.times = Times(begin=time.perf_counter())

    async def update_weights(self, payload: JsonValue) -> None:
        # CUDA IPC handles of vLLM's engine travel as the fleet's routes send them on.
        pickled = False
        if isinstance(payload, dict) and FIELD in payload:
            pickled = payload[FIELD] is not None
            payload = refuse_or_restrict(payload, allowed=True)
        payload = payload if pickled else encode_payload(payload)
        await self._run(Receive(round_id=self.version + 1, payload=payload))

    async def finish_weight_update(self) -> None:
        staged = await self._run(Verify(round_id=self.version + 1))
        assert isinstance(staged, Staged)
        assert (Check.DIGESTS in staged.checks) is self._states_digests, "digests differ or were not compared"
        self.times.staged = time.perf_counter()
        self.arrived_bytes = staged.size_bytes
        self.version += 1
        commit = Commit(
            round_id=self.version,
            version=self.version,
            hold=False,
            kv_cache=self.kv_cache,
            in_flight=InFlight.KEEP,
        )
        await self._run(commit)
        self.times.live = time.perf_counter()

    async def _run(self, body: Body) -> Any:
        return await asyncio.wait_for(self._member.execute(body), TIMEOUT_S)


class Native:
    """An engine that loads with vLLM's own transfer engine inside a pause, as vLLM's examples do."""

    def __init__(self, engine: Any, kv_cache: KvCache = KvCache.KEEP) -> None:
        self.engine = engine
        self._llm = engine.llm
        self.kv_cache = kv_cache
        self.times = Times()

    async def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def start_weight_update(self) -> None:
        self.times = Times(begin=time.perf_counter())
        await self._llm.pause_generation(mode="keep", clear_cache=self.kv_cache is KvCache.RECOMPUTE)
        await self._llm.start_weight_update()

    async def update_weights(self, payload: Any) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=payload))

    async def finish_weight_update(self) -> None:
        await self._llm.finish_weight_update(None)
        self.times.staged = time.perf_counter()
        await self._llm.resume_generation()
        self.times.live = time.perf_counter()


async def start_engine(model: str, backend: str, staging: str, **arguments: Any) -> Any:
    from deployments.replica.replica_engine import ReplicaEngine
    from deployments.replica.server_arguments import EngineSpec

    chosen = {"max_model_len": 4096, "gpu_memory_utilization": 0.5, **arguments}
    spec = EngineSpec(model=model, served_model_name="m", backend=backend, staging=staging, arguments=chosen)
    return await ReplicaEngine.start(spec, version=0)
