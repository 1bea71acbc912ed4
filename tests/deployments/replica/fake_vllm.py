"""vLLM as far as a member's instructions reach it: it refuses what the real one refuses."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI

from deployments.protocol.engine_state import SleepTag
from deployments.protocol.poll import Check, Outcome, StoreResult
from deployments.replica.engine_core import COMMIT, DRAIN, END_DRAIN, RESET_CACHES
from deployments.replica.member import StagedMember
from deployments.replica.replica_engine import ReplicaEngine
from deployments.weights.staging.staged_update import StagingState, to_wire

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


class FakeLlm:
    """An AsyncLLM, its engine core and its workers, which stage at once and say what the test has set."""

    def __init__(self, workers: int = 1) -> None:
        self.engine_core = self
        parallel = SimpleNamespace(data_parallel_size=1, world_size_across_dp=workers)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.output_processor = SimpleNamespace(has_unfinished_requests=lambda: self.busy)
        self.busy = False
        self.errored = False  # whether its engine core has ended
        self.begins = True  # its scheduler begins requests
        self.generating = 0
        self.did: list[str] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []  # of the workers
        self.fails: dict[str, Exception] = {}  # by method of the workers
        self.broken: Exception | None = None  # what every call of the workers raises
        self.connects = replace(DONE, payloads_done=1, digest="")
        self.states = [DONE] * workers  # of the open update; its payloads are counted here
        self.stored: StoreResult | None = None
        self.reload_refusal: str | None = None
        self._asleep: set[str] = set()
        self._active = False  # the workers' `_weight_update_active`
        self._connecting = False  # what it has begun last is a connection
        self._payloads = 0
        self._expected: int | None = None  # tensors that the open update is to retain
        self._retained: int | None = None

    # -- the scheduler ------------------------------------------------------------------------

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        self.did.append(f"pause {mode}")
        self.begins = False

    async def resume_scheduler_async(self) -> None:
        if self._asleep:
            raise RuntimeError("a step without its memory")
        self.did.append("resume")
        self.begins = True

    async def set_weight_version_async(self, version: str) -> None:
        self.did.append(f"version {version}")

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.begins = False

    async def sleep(self, level: int, mode: str) -> None:
        self.begins = False
        if level:
            self._asleep = {SleepTag.WEIGHTS, SleepTag.KV_CACHE}

    async def wake_up(self, tags: list[str] | None) -> None:
        # vLLM's executor does nothing if one of the named parts is awake.
        if tags is None or set(tags) - {SleepTag.SCHEDULING} <= self._asleep:
            self._asleep -= set(self._asleep if tags is None else tags)
        if not self._asleep:
            self.begins = True

    async def call_utility_async(self, method: str, *arguments: Any) -> float:
        self.did.append(" ".join([method, *map(str, arguments)]))
        match method:
            case str() if method == COMMIT:
                self.begins = False
                await self.collective_rpc("finish_weight_update")
                if arguments[2]:
                    await self.resume_scheduler_async()
            case str() if method == DRAIN:
                if self._asleep:
                    raise RuntimeError("a step without its memory")
                self.begins = False
            case str() if method == RESET_CACHES:
                assert not self.begins, "a request would be computed with weights that are being replaced"
            case str() if method == END_DRAIN:
                self.begins = not arguments[0]
        return self.generating

    # -- the workers --------------------------------------------------------------------------

    async def collective_rpc(self, method: str, kwargs: Any = None) -> list[Any]:
        self.did.append(method)
        arguments = kwargs or {}
        self.calls.append((method, arguments))
        error = self.broken or self.fails.get(method)
        if error is not None:
            raise error
        return self.answers(method, arguments)

    def named(self, method: str) -> list[dict[str, Any]]:
        """The arguments of each call of this method."""
        return [arguments for name, arguments in self.calls if name == method]

    def answers(self, method: str, arguments: dict[str, Any]) -> list[Any]:
        """One for each worker."""
        others = [None] * (len(self.states) - 1)
        match method:
            case "staging_progress" if self._connecting:
                return [to_wire(self.connects)] * len(self.states)
            case "staging_progress" | "staging_verify":
                assert self._active, "StagedWeightTransferEngine has no update"
                return [to_wire(replace(state, payloads_done=self._payloads)) for state in self.states]
            case "staging_store_state":
                return [None if self.stored is None else to_wire(self.stored), *others]
            case "reload_refusal":
                return [*others, self.reload_refusal]
        return [self._work(method, arguments)] * len(self.states)

    def _work(self, method: str, arguments: dict[str, Any]) -> Any:
        match method:
            case "answer_calls_at":
                return False
            case "staging_receive" | "staging_read":
                if arguments["begins"]:
                    self._start()
                    self._expected = arguments["retain_version"]
                self._update()
            case "init_weight_transfer_engine":
                self._connecting = True
            case "staging_drop":
                self._active = False
            case "staging_store":
                if self._retained != arguments["body"]["version"]:
                    raise ValueError(f"retained is {self._retained}")
            case "staging_forget":
                assert self._retained == arguments["version"]
                self._retained = None
            case "start_weight_update":
                self._start()
            case "native_update":
                self._update()
            case "native_digest":
                return "aa"
            case "finish_weight_update":
                if not self._active:
                    raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
                self._touch_weights()
                self._active, self._retained = False, self._expected
            case "shutdown_weight_transfer_engine":
                if self._active:
                    raise RuntimeError("Cannot release a trainer connection during a weight update")
            case "load_checkpoint":
                self._touch_weights()
        return None

    def _start(self) -> None:
        if self._active:
            raise RuntimeError("start_weight_update called while a weight update is already active.")
        self._active, self._connecting, self._payloads = True, False, 0

    def _update(self) -> None:
        if not self._active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        self._payloads += 1

    def _touch_weights(self) -> None:
        if SleepTag.WEIGHTS in self._asleep:
            raise RuntimeError("no memory behind the weights")


class FakeEngine(ReplicaEngine):
    """The real engine's rules, over a process that was never started."""

    async def stop(self, limit_s: float = 0.0) -> None:
        pass


def staged_member(llm: FakeLlm) -> StagedMember:
    """At version 3; while requests run, its workers stage for a quarter of the time."""
    engine = FakeEngine(llm, FastAPI(), version=3)  # type: ignore[arg-type]
    engine.staging_share = 0.25
    return StagedMember(engine)
