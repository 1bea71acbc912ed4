"""One vLLM server: an AsyncLLM, vLLM's own FastAPI application, and the swap.

Everything that changes weights or pauses the scheduler is here: the swap, the reset of the caches and the new
version share one pause.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, cast

from fastapi import FastAPI
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.utils import random_uuid
from vllm.utils.system_utils import kill_process_tree
from vllm.v1.engine.async_llm import AsyncLLM
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
from deployments.protocol.errors import SlipstreamError
from deployments.protocol.poll import Commit, Draining, KvCache, Swapped, drain_of_round
from deployments.replica.continuation import TOKENS
from deployments.replica.engine_adapters import EngineAdapters, Uses
from deployments.replica.engine_core import COMMIT, DRAIN, END_DRAIN, RESET_CACHES, RUNNING, STOP_DRAFTING
from deployments.replica.server_arguments import EngineSpec, FleetEngineArgs, check_drafting, server_arguments
from deployments.replica.server_info import fleet_fingerprint
from deployments.replica.spans import RECORDER, SpanRecorder
from deployments.replica.worker_calls import WorkerCalls

DRAIN_POLL_S = 0.05
COUNT_S = 10.0  # the engine core answers between two steps

logger = serve_logger()


class EngineDrain:
    """Schedules no new request while running ones finish. Reports have their number."""

    def __init__(self, ask: Callable[[str], Awaitable[list[int]]]) -> None:
        self._ask = ask
        self.ids: dict[str, None] = {}
        self._running: int | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def state(self) -> Draining | None:
        return Draining(drain_ids=tuple(self.ids), running=self._running) if self.ids else None

    async def begin(self, drain_id: str, *, may_run: bool) -> None:
        """If the scheduler may not run now, the engine asks again later."""
        self.ids[drain_id], self._running = None, None
        await self._count(DRAIN if may_run else RUNNING)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    def end(self, drain_id: str) -> bool:
        was = drain_id in self.ids
        self.ids.pop(drain_id, None)
        return was and not self.ids

    async def _watch(self) -> None:
        while self.ids:
            await asyncio.sleep(DRAIN_POLL_S)
            await self._count(RUNNING)

    async def _count(self, utility: str) -> None:
        try:
            async with asyncio.timeout(COUNT_S):  # not wait_for, which can swallow a cancellation
                self._running = sum(await self._ask(utility))
        except TimeoutError:
            self._running = None
        except Exception as error:  # a dead engine, which the health check reports
            logger.debug("cannot count running requests: %s", error)
            self._running = None


# vLLM's beam search makes an engine request with such an id per beam and step. Which ones end up in a choice
# is unknown: the choice has no spans, and the response the newest version.
_BEAM = re.compile(r"-[0-9a-f]{16,32}-beam-\d+$")


class RecordingLLM(AsyncLLM):
    """Tells the request's `SpanRecorder` which versions generated its tokens. Refuses what vLLM answers with
    500, which clients would retry."""

    adapter_uses: Uses | None = None

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        require_text("request_id", request_id)
        require_text("stop", sampling_params.stop)
        require_text("bad_words", sampling_params.bad_words)
        require_text("vllm_xargs", sampling_params.extra_args)
        if TOKENS in (sampling_params.extra_args or ()):
            raise VLLMValidationError(f"'vllm_xargs': {TOKENS!r} is the fleet's own")
        config = self.vllm_config
        is_cpu = config.device_config.device_type == "cpu"
        if sampling_params.prompt_logprobs is not None and config.lora_config is not None and is_cpu:
            raise VLLMValidationError("'prompt_logprobs': vLLM's engine with adapters ends at them on a CPU")
        recorder = RECORDER.get()
        capture = None if recorder is None else recorder.capture
        sampled = sampling_params if capture is None else capture.sampling(sampling_params)
        stream = super().generate(prompt, sampled, request_id, **options)
        adapter = options.get("lora_request")
        if adapter is not None and self.adapter_uses is not None:
            stream = self._using(stream, self.adapter_uses.using(adapter.lora_int_id))
        if recorder is None:
            return stream
        first_choice = None if _BEAM.search(request_id) else recorder.open_call(sampling_params.n)
        if capture is not None:
            stream = capture.taken(stream, prompt, sampling_params, first_choice, lambda: recorder.adapter)
            if capture.said is not None and (
                first_choice != 0
                or sampling_params.n != 1
                or sampling_params.output_kind is not RequestOutputKind.DELTA
                or sampling_params.prompt_logprobs is not None
            ):
                capture.said.give_up()
        constrained = sampling_params.structured_outputs is not None
        return self._recorded(stream, recorder, first_choice, constrained)

    async def _add_request(
        self, request: Any, prompt: str | None, parent_req: Any, index: int, queue: Any
    ) -> None:
        recorder = RECORDER.get()
        capture = None if recorder is None else recorder.capture
        if recorder is None or capture is None or capture.said is None or parent_req is not None:
            await super()._add_request(request, prompt, parent_req, index, queue)
            return
        self.check_admission(request_id=request.request_id)
        self.output_processor.add_request(request, prompt, None, index, queue)
        try:
            begins = await capture.said.replay(self.output_processor, request, queue, recorder.adapter)
        except BaseException as error:  # vLLM aborts what is still in its queue
            if isinstance(error, SlipstreamError):
                capture.failure = error
            self.output_processor.abort_requests([request.request_id], internal=True)
            raise
        if begins:
            await self.engine_core.add_request_async(request)

    async def _using(
        self, stream: AsyncGenerator[RequestOutput, None], use: AbstractContextManager[None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generation may outlast the HTTP request."""
        with use:
            async for output in stream:
                yield output

    async def _recorded(
        self,
        stream: AsyncGenerator[RequestOutput, None],
        recorder: SpanRecorder,
        first_choice: int | None,
        constrained: bool,
    ) -> AsyncGenerator[RequestOutput, None]:
        async for output in stream:
            for completion in output.outputs:
                if constrained and completion.finish_reason == "error":
                    raise VLLMValidationError(
                        "expected a grammar or schema that allows a next token, got one that allows none: "
                        "a rule may refer to nothing but itself"
                    )
                if completion.weight_versions is not None:
                    spans = [
                        {"version": int(span.version), "start": span.start, "end": span.end}
                        for span in completion.weight_versions
                    ]
                    if first_choice is None:
                        recorder.saw(spans)
                    else:
                        recorder.record(first_choice + completion.index, spans)
            yield output


def use_same_ids() -> None:
    """Ids in captured requests' events become `Capture.next_id`. The engine's own stay random: attempts of
    one request may meet in one engine."""
    from vllm.entrypoints.openai.responses import protocol, streaming_events
    from vllm.renderers import chat_utils

    def next_id() -> str:
        recorder = RECORDER.get()
        capture = None if recorder is None else recorder.capture
        return random_uuid() if capture is None else capture.next_id()

    for module in (chat_utils, protocol, streaming_events):
        module.random_uuid = next_id


def require_text(name: str, value: Any) -> None:
    """Raises VLLMValidationError for text that is not Unicode: engine requests are in UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise VLLMValidationError(
            f"expected text in {name!r}, got half of a surrogate pair: {error.object[:60]!r}"
        ) from error


FIRST_CALL_S = 60.0  # calls that only read or set a value
EXIT_S = 4.0  # then vLLM kills the engine's processes
STOP_S = 8.0  # then we kill them


class ReplicaEngine:
    def __init__(self, llm: RecordingLLM, app: FastAPI, version: int) -> None:
        self.llm = llm
        self.app = app
        self.version = version
        self.world_size: int = llm.vllm_config.parallel_config.world_size_across_dp
        self.staging_share = 1.0
        self.condition: EngineState = ()  # set by users: paused, asleep
        self.held = False  # paused until `release`, even if users resume
        self.drains = EngineDrain(self._ask_cores)
        models = getattr(app.state, "openai_serving_models", None)
        self.calls = WorkerCalls(self.workers)
        self.adapters = EngineAdapters(llm, self.calls, models)
        llm.adapter_uses = self.adapters.uses
        self._lifespan = app.router.lifespan_context(app)
        self._stopping: asyncio.Task[None] | None = None
        self._stopping_drafts: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, spec: EngineSpec, *, version: int) -> "ReplicaEngine":
        args = server_arguments(spec)
        engine_args = FleetEngineArgs.from_cli_args(args)
        with kept_log_file():
            config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
            check_drafting(spec, config)
            llm = RecordingLLM.from_vllm_config(
                vllm_config=config,
                usage_context=UsageContext.OPENAI_API_SERVER,
                enable_log_requests=engine_args.enable_log_requests,
                disable_log_stats=engine_args.disable_log_stats,
            )
            assert isinstance(llm, RecordingLLM)
        use_same_ids()
        args.fingerprint_mode, args.fingerprint_value = "custom", fleet_fingerprint(config, args)
        tasks = await asyncio.wait_for(llm.get_supported_tasks(), FIRST_CALL_S)
        app = build_app(args, tasks, llm.model_config)
        await init_app_state(llm, app.state, args, tasks)
        app.state.server = SimpleNamespace(should_exit=False)  # vLLM's error handler expects a uvicorn server
        engine = cls(llm, app, version)
        engine.staging_share = spec.staging_share
        await engine._lifespan.__aenter__()
        await asyncio.wait_for(llm.update_weight_version(str(version)), FIRST_CALL_S)
        await asyncio.wait_for(engine.calls.connect(), FIRST_CALL_S)
        return engine

    @property
    def busy(self) -> bool:
        return self.may_resume and self.llm.output_processor.has_unfinished_requests()

    @property
    def asleep(self) -> frozenset[SleepTag]:
        return asleep(self.condition)

    @property
    def dead(self) -> bool:
        return self.llm.errored

    async def workers(self, method: str, **arguments: Any) -> list[Any]:
        """One answer per worker of every data-parallel rank."""
        core: Any = self.llm.engine_core
        try:
            if self.llm.vllm_config.parallel_config.data_parallel_size > 1:
                # collective_rpc runs on all ranks but returns only the first one's answers.
                answers = await core.call_utility_all_async("collective_rpc", method, None, (), arguments)
                return [answer for rank in answers for answer in rank]
            return cast(list[Any], await self.llm.collective_rpc(method, kwargs=arguments))
        except asyncio.CancelledError as error:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            # Cancelled by the engine. An instruction without acknowledgement would be fenced.
            raise RuntimeError(f"the engine cancelled {method}") from error

    async def commit(self, args: Commit) -> Swapped:
        """Stays paused if `args.hold`, if a user paused the engine, or while part of it sleeps."""
        begin = time.perf_counter()
        recompute = args.kv_cache is KvCache.RECOMPUTE
        self.held = args.hold
        self.drains.end(drain_of_round(args.round_id))
        resume = self.may_resume
        if args.in_flight is InFlight.ABORT:
            # Not llm.pause_generation: it sleeps 20 ms for tidy logs.
            await self.llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=False)
        swap_s = max(await self._ask_cores(COMMIT, str(args.version), recompute, resume))
        self.version = args.version
        await self._resume_drained()
        return Swapped(swap_s=swap_s, gap_s=time.perf_counter() - begin)

    async def reset_caches(self, *, recompute: bool) -> None:
        await self._ask_cores(RESET_CACHES, recompute)

    async def release(self) -> None:
        self.held = False
        await self._resume_if_allowed()

    async def load(self, path: str, version: int) -> None:
        core = self.llm.engine_core
        await core.pause_scheduler_async(mode="keep", clear_cache=False)
        await self.workers("load_checkpoint", path=path)
        await self.reset_caches(recompute=True)
        await core.set_weight_version_async(str(version))
        self.version = version
        await self.release()

    def stop_drafting(self, version: int) -> None:
        """Until the next version, if this one is live when the engine core has the call."""
        self._stopping_drafts = asyncio.create_task(self._stop_drafting(version))

    async def _stop_drafting(self, version: int) -> None:
        try:
            async with asyncio.timeout(COUNT_S):
                await self._ask_cores(STOP_DRAFTING, str(version))
        except Exception as error:  # a dead engine, which the health check reports
            logger.warning("the engine core has not answered that it drafts no more: %r", error)

    async def drain(self, drain_id: str) -> None:
        await self.drains.begin(drain_id, may_run=not (self.held or self.asleep))

    async def end_drain(self, drain_id: str) -> None:
        if self.drains.end(drain_id) and not (self.held or self.asleep):
            await self._ask_cores(END_DRAIN, is_paused(self.condition))

    async def pause(self, operation: Pause) -> None:
        """Mode `wait` drained the engine before."""
        await self.llm.pause_generation(mode=operation.mode.value, clear_cache=operation.clear_cache)
        self.condition = apply(self.condition, operation)
        await self._resume_drained()

    async def resume(self) -> None:
        self.condition = apply(self.condition, Resume())
        await self._resume_if_allowed()

    async def sleep(self, operation: Sleep) -> None:
        await self.llm.sleep(level=operation.level, mode=operation.mode.value)
        self.condition = apply(self.condition, operation)

    async def wake_up(self, operation: WakeUp) -> None:
        """All memory or by tags; the last part also resumes the scheduler."""
        sleeping = self.asleep & MEMORY_TAGS
        tags = operation.tags
        if tags is not None and sleeping:
            # vLLM does nothing if one of the named parts is awake.
            tags = tuple(tag for tag in tags if tag in sleeping or tag not in MEMORY_TAGS)
            if not tags:
                return
        if sleeping or not self.held:  # if nothing sleeps, vLLM only resumes, which a hold forbids
            calls: list[Any] = [self.llm.wake_up(None if tags is None else [tag.value for tag in tags])]
            if self.held:  # undo vLLM's resume; the core handles the calls in order
                calls.append(self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))
            await asyncio.gather(*calls)
        self.condition = apply(self.condition, WakeUp(tags=tags))
        await self._resume_drained()

    @property
    def may_resume(self) -> bool:
        # A step without KV cache memory would crash the engine.
        return not (self.held or self.drains.ids or is_paused(self.condition) or self.asleep)

    async def _resume_if_allowed(self) -> None:
        await self._resume_drained()
        if self.may_resume:
            await self.llm.engine_core.resume_scheduler_async()

    async def _resume_drained(self) -> None:
        """Running requests of a drain continue after something else paused the scheduler."""
        if self.drains.ids and not (self.held or self.asleep):
            await self._ask_cores(DRAIN)

    async def _ask_cores(self, utility: str, *arguments: Any) -> list[Any]:
        core: Any = self.llm.engine_core
        if self.llm.vllm_config.parallel_config.data_parallel_size == 1:
            # call_utility_all_async is sent later than other calls: that would change the order.
            return [await core.call_utility_async(utility, *arguments)]
        return list(await core.call_utility_all_async(utility, *arguments))

    async def stop(self, limit_s: float = STOP_S) -> None:
        """Idempotent. Kills processes after `limit_s`."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(limit_s))
        await asyncio.shield(self._stopping)

    async def _stop(self, limit_s: float) -> None:
        # vLLM notifies requests when an engine dies, but not when it is stopped.
        self.llm.output_processor.propagate_error(EngineDeadError())
        self.calls.close()
        processes = getattr(self.llm.engine_core.resources.engine_manager, "processes", [])
        try:
            await self._lifespan.__aexit__(None, None, None)
        finally:
            try:  # AsyncLLM.__del__ is too late and prints a TypeError
                await asyncio.wait_for(asyncio.to_thread(self.llm.shutdown, EXIT_S), limit_s)
            except TimeoutError:
                logger.warning("engine did not exit within %g s, killing its processes", limit_s)
            finally:
                for process in processes:
                    if process.is_alive():
                        kill_process_tree(process.pid)
