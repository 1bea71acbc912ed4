"""An engine whose workers answer the calls of a staged member as they are told to."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from deployments.protocol.poll import (
    Check,
    Commit,
    Outcome,
    StoreResult,
    Swapped,
)
from deployments.replica.adapters.reading import AdapterReader
from deployments.weights.staging.worker_reports import ConnectState, StagingState, to_wire

CHECKS = (Check.NAMES, Check.COMPLETE, Check.FINITE, Check.DIGESTS)
DONE = StagingState(
    payloads_done=0,
    size_bytes=100,
    stage_s=0.5,
    verify_s=0.1,
    outcome=Outcome.DONE,
    digest="aa",
    checks=CHECKS,
)


class Workers:
    """Two workers as `ReplicaEngine.workers` reaches them, without shared memory. They stage at once."""

    world_size = 2
    staging_share = 0.25
    busy = False
    dead = False
    asleep: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.version = 3
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.connects = ConnectState(done=True, outcome=Outcome.DONE)
        self.states = [DONE, replace(DONE, stage_s=0.75)]
        self.stored: StoreResult | None = None
        self.broken: Exception | None = None  # what every call raises
        self.active = False  # vLLM's own flag for an update
        self.reload_refusal: str | None = None
        self.adapters = SimpleNamespace(
            reader=AdapterReader(None, self.workers),
            load=lambda adapter: self.workers("add_lora", adapter=adapter),
        )
        self.arrives = asyncio.Event()  # what was sent of an adapter

    async def workers(self, method: str, **arguments: Any) -> list[Any]:
        self.calls.append((method, arguments))
        if self.broken is not None:
            raise self.broken
        match method:
            case "staging_connected":
                return [to_wire(self.connects)] * 2
            case "staging_report_to":
                return [True, False]
            case "staging_receive" | "staging_read":
                assert arguments["begins"] or self.active, "vLLM: update_weights without a start"
                if arguments["begins"] and self.active:
                    raise RuntimeError("start_weight_update called while a weight update is already active")
                self.active = True
                done = self.states[0].payloads_done * (not arguments["begins"]) + 1
                self.states = [replace(state, payloads_done=done) for state in self.states]
            case "staging_receive_files":
                self.states = [replace(state, payloads_done=0) for state in self.states]
                self.arrives.set()
            case "staging_progress" | "staging_verify":
                if self.arrives.is_set():
                    self.states = [replace(state, payloads_done=1) for state in self.states]
                return [to_wire(state) for state in self.states]
            case "reload_refusal":
                return [None, self.reload_refusal]
            case "staging_drop":
                self.active = False
            case "staging_store_state":
                return [None if self.stored is None else to_wire(self.stored), None]
        return [None, None]

    async def commit(self, body: Commit) -> Swapped:
        if not self.active:
            raise RuntimeError("finish_weight_update called without start_weight_update")
        self.active, self.version = False, body.version
        return Swapped(swap_s=0.01, gap_s=0.02)

    async def load(self, path: str, version: int) -> None:
        self.calls.append(("load", {"path": path}))
        self.version = version

    def named(self, method: str) -> list[dict[str, Any]]:
        return [arguments for name, arguments in self.calls if name == method]
