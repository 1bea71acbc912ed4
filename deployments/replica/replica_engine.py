"""One vLLM server in this process: an AsyncLLM, vLLM's own FastAPI application, and the swap.

Everything that changes weights or the scheduler goes through here, so that a swap, the reset of
the caches and the new version happen inside one pause.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

from fastapi import FastAPI
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.usage.usage_lib import UsageContext
from vllm.utils.system_utils import kill_process_tree
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.host.logs import kept_log_file, serve_logger
from deployments.protocol.engine_state import (
    MEMORY_TAGS,
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
from deployments.protocol.poll import Commit, Draining, KvCache, Swapped, drain_of_round
from deployments.replica.adapters.engine_adapters import EngineAdapters
from deployments.replica.engine_core import COMMIT, DRAIN, END_DRAIN, RESET_CACHES, RUNNING
from deployments.replica.recording_llm import RecordingLLM, new_llm
from deployments.replica.server_arguments import EngineSpec, FleetEngineArgs, server_arguments
from deployments.replica.server_info import fleet_fingerprint

# One engine's drain: it begins no request, and lets those that run come to their end.
#
#     begin ─► the engine core begins nothing ─► asked every `DRAIN_POLL_S` how many requests run ─► end
#
# Nobody waits here: the replica's reports say what still runs, and the controller decides when it is enough.

DRAIN_POLL_S = 0.05
ANSWER_S = 10.0  # of the engine core, which answers between two steps

logger = serve_logger()


class EngineDrain:
    """The drains that the controller has asked for.

    Args:
        ask: calls a utility of every engine core; one answer for each.
    """

    def __init__(self, ask: Callable[[str], Awaitable[list[int]]]) -> None:
        self._ask = ask
        self._ids: dict[str, None] = {}  # in order
        self._running: int | None = None
        self._watching: asyncio.Task[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._ids)

    @property
    def state(self) -> Draining | None:
        """For the replica's reports; None: it does not drain."""
        return Draining(drain_ids=tuple(self._ids), running=self._running) if self._ids else None

    async def begin(self, drain_id: str, *, may_run: bool) -> None:
        """Drain for one more. An engine that does not answer is not waited for.

        Args:
            may_run: whether its scheduler may run at all. If not, `resumed` begins the drain.
        """
        self._ids[drain_id], self._running = None, None
        await self._count(DRAIN if may_run else RUNNING)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    async def resumed(self) -> None:
        """The scheduler runs again: only what is drained."""
        await self._ask(DRAIN)

    def end(self, drain_id: str) -> bool:
        """Forget a drain; whether it was the last one."""
        was = drain_id in self._ids
        self._ids.pop(drain_id, None)
        return was and not self._ids

    async def _watch(self) -> None:
        while self._ids:
            await asyncio.sleep(DRAIN_POLL_S)
            await self._count(RUNNING)

    async def _count(self, utility: str) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):  # not wait_for, which can swallow a cancellation
                self._running = sum(await self._ask(utility))
        except TimeoutError:
            self._running = None
        except Exception as error:  # a dead engine: the replica's health check finds it
            logger.debug("the engine does not say how many requests run: %s", error)
            self._running = None


FIRST_CALL_S = 60.0  # of an engine that is up, to the calls that only read or set a value
END_S = 4.0  # an engine's processes may take this long to end by themselves; vLLM kills them then
STOP_S = 8.0  # then we do


class ReplicaEngine:
    """An engine that is up. `version` names the weights that it computes with."""

    def __init__(self, llm: RecordingLLM, app: FastAPI, version: int) -> None:
        self.llm = llm
        self.app = app
        self.version = version
        self.staging_share = 1.0
        self.condition: EngineState = ()  # what users did to it: paused, asleep
        self.held = False  # stays paused until `release`, whatever users ask for meanwhile
        self._drain = EngineDrain(self._ask_cores)
        models = getattr(app.state, "openai_serving_models", None)
        self.adapters = EngineAdapters(llm, self.workers, models)
        llm.adapter_uses = self.adapters.uses
        self._lifespan = app.router.lifespan_context(app)
        self._stopping: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, spec: EngineSpec, *, version: int) -> "ReplicaEngine":
        """Start the engine's processes and build its application; about 30 s on a CPU."""
        args = server_arguments(spec)
        engine_args = FleetEngineArgs.from_cli_args(args)
        with kept_log_file():
            config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
            llm = new_llm(config, engine_args)
        args.fingerprint_mode, args.fingerprint_value = "custom", fleet_fingerprint(config, args)
        tasks = await asyncio.wait_for(llm.get_supported_tasks(), FIRST_CALL_S)
        app = build_app(args, tasks, llm.model_config)
        await init_app_state(llm, app.state, args, tasks)
        app.state.server = SimpleNamespace(should_exit=False)  # vLLM's error handler wants a uvicorn server
        engine = cls(llm, app, version)
        engine.staging_share = spec.staging_share
        await engine._lifespan.__aenter__()
        await asyncio.wait_for(llm.update_weight_version(str(version)), FIRST_CALL_S)
        await asyncio.wait_for(engine.adapters.connect(), FIRST_CALL_S)
        return engine

    @property
    def world_size(self) -> int:
        return self.llm.vllm_config.parallel_config.world_size_across_dp

    @property
    def busy(self) -> bool:
        """Whether requests are being served."""
        return self.may_resume and self.llm.output_processor.has_unfinished_requests()

    @property
    def asleep(self) -> frozenset[SleepTag]:
        """The parts that sleep."""
        return asleep(self.condition)

    @property
    def dead(self) -> bool:
        return self.llm.errored

    async def workers(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of every worker of every data-parallel rank; one answer a worker."""
        core: Any = self.llm.engine_core
        if self.llm.vllm_config.parallel_config.data_parallel_size > 1:
            # collective_rpc would run everywhere and return the first rank's answers only.
            answers = await core.call_utility_all_async("collective_rpc", method, None, (), arguments)
            return [answer for rank in answers for answer in rank]
        return cast(list[Any], await self.llm.collective_rpc(method, kwargs=arguments))

    async def commit(self, args: Commit) -> Swapped:
        """Make the staged version the live one between two decoding steps.

        Stays paused if `args.hold`, if a user has paused the engine, or while a part of it sleeps.
        """
        begin = time.perf_counter()
        recompute = args.kv_cache is KvCache.RECOMPUTE
        self.held = args.hold
        one_rank = self.llm.vllm_config.parallel_config.data_parallel_size == 1
        self._drain.end(drain_of_round(args.round_id))
        resume = self.may_resume
        if one_rank and args.in_flight is not InFlight.ABORT:
            core: Any = self.llm.engine_core
            swap_s = await core.call_utility_async(COMMIT, str(args.version), recompute, resume)
        else:
            swap_s = await self._commit_by_calls(args, recompute, resume)
        self.version = args.version
        await self._resume_drained()
        return Swapped(swap_s=swap_s, gap_s=time.perf_counter() - begin)

    async def _commit_by_calls(self, args: Commit, recompute: bool, resume: bool) -> float:
        """The same with vLLM's own calls; the seconds from the pause to the end."""
        core = self.llm.engine_core
        # Not llm.pause_generation: it sleeps 20 ms after the pause for the sake of tidy logs. The
        # answer is awaited, because a step in flight would be labelled with the new version.
        mode = InFlight.ABORT if args.in_flight is InFlight.ABORT else InFlight.KEEP  # drained, if it waits
        await core.pause_scheduler_async(mode=mode.value, clear_cache=False)
        paused = time.perf_counter()
        calls: list[Any] = [
            self.workers("finish_weight_update"),
            self.reset_caches(recompute=recompute),
            core.set_weight_version_async(str(args.version)),
        ]
        if resume:
            calls.append(core.resume_scheduler_async())
        # Sent without waiting in between: the engine core handles them in this order.
        failures = [
            r for r in await asyncio.gather(*calls, return_exceptions=True) if isinstance(r, Exception)
        ]
        if failures:
            raise failures[0]
        return time.perf_counter() - paused

    async def reset_caches(self, *, recompute: bool) -> None:
        """Drop what was computed with weights that are replaced; in the pause in which they are."""
        await self._ask_cores(RESET_CACHES, recompute)

    async def release(self) -> None:
        """End a hold. A user's pause or sleep goes on."""
        self.held = False
        await self._resume_if_allowed()

    async def load(self, path: str, version: int) -> None:
        """Load a checkpoint directory into the running engine (a joiner that catches up)."""
        core = self.llm.engine_core
        await core.pause_scheduler_async(mode="keep", clear_cache=False)
        await self.workers("load_checkpoint", path=path)
        await self.reset_caches(recompute=True)
        await core.set_weight_version_async(str(version))
        self.version = version
        await self.release()

    @property
    def draining(self) -> Draining | None:
        """What it drains for, and what still runs; None: nothing."""
        return self._drain.state

    async def drain(self, drain_id: str) -> None:
        """Begin no request until `end_drain`, and let those that run end; see `draining`."""
        await self._drain.begin(drain_id, may_run=not (self.held or self.asleep))

    async def end_drain(self, drain_id: str) -> None:
        """Begin requests again if nothing else forbids it."""
        if self._drain.end(drain_id) and not (self.held or self.asleep):
            await self._ask_cores(END_DRAIN, is_paused(self.condition))

    async def pause(self, operation: Pause) -> None:
        """Stop scheduling until `resume`. With mode `wait` the engine was drained before."""
        await self.llm.pause_generation(mode=operation.mode.value, clear_cache=operation.clear_cache)
        self.condition = apply(self.condition, operation)
        await self._resume_drained()

    async def resume(self) -> None:
        """End a pause. An engine that sleeps goes on sleeping, and one that is held waits for its release."""
        self.condition = apply(self.condition, Resume())
        await self._resume_if_allowed()

    async def sleep(self, operation: Sleep) -> None:
        """Release memory: at level 1 the weights move to host memory, at level 2 they are discarded."""
        await self.llm.sleep(level=operation.level, mode=operation.mode.value)
        self.condition = apply(self.condition, operation)

    async def wake_up(self, operation: WakeUp) -> None:
        """Take memory back, all of it or by tags; the last part also resumes the scheduler."""
        sleeping = self.asleep & MEMORY_TAGS
        tags = operation.tags
        if tags is not None and sleeping:
            # vLLM does nothing at all if one of the named parts is awake already.
            tags = tuple(tag for tag in tags if tag in sleeping or tag not in MEMORY_TAGS)
            if not tags:
                return
        if sleeping or not self.held:  # without memory to wake vLLM only resumes, which is for the release
            calls: list[Any] = [self.llm.wake_up(None if tags is None else [tag.value for tag in tags])]
            if self.held:  # vLLM resumes with the last part; the engine core handles the calls in this order
                calls.append(self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))
            await asyncio.gather(*calls)
        self.condition = apply(self.condition, WakeUp(tags=tags))
        await self._resume_drained()

    @property
    def may_resume(self) -> bool:
        # A step without its KV cache's memory would end the engine.
        return not (self.held or self._drain or is_paused(self.condition) or self.asleep)

    async def _resume_if_allowed(self) -> None:
        await self._resume_drained()
        if self.may_resume:
            await self.llm.engine_core.resume_scheduler_async()

    async def _resume_drained(self) -> None:
        """What runs while it is drained goes on, whatever else has stopped the scheduler meanwhile."""
        if self._drain and not (self.held or self.asleep):
            await self._drain.resumed()

    async def _ask_cores(self, utility: str, *arguments: Any) -> list[Any]:
        core: Any = self.llm.engine_core
        if self.llm.vllm_config.parallel_config.data_parallel_size == 1:
            # The call to all ranks is sent later than one to a single core: the order would be lost.
            return [await core.call_utility_async(utility, *arguments)]
        return list(await core.call_utility_all_async(utility, *arguments))

    async def stop(self, limit_s: float = STOP_S) -> None:
        """End the engine's processes, by force after `limit_s`. Later calls wait for the first."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(limit_s))
        await asyncio.shield(self._stopping)

    async def _stop(self, limit_s: float) -> None:
        # vLLM tells requests of an engine that has died. Of one that is stopped they would hear nothing.
        self.llm.output_processor.propagate_error(EngineDeadError())
        self.adapters.close()
        processes = getattr(self.llm.engine_core.resources.engine_manager, "processes", [])
        try:
            await self._lifespan.__aexit__(None, None, None)
        finally:
            try:  # AsyncLLM's own `__del__` is too late and prints a TypeError
                await asyncio.wait_for(asyncio.to_thread(self.llm.shutdown, END_S), limit_s)
            except TimeoutError:
                logger.warning("the engine did not end within %g s: its processes are killed", limit_s)
            finally:
                for process in processes:
                    if process.is_alive():
                        kill_process_tree(process.pid)
