"""Utilities of vLLM's engine core: the commit between two decoding steps, and the drain before it.

Composed of vLLM's own calls a commit idles the device: `pause_scheduler` answers only once it is idle, and
each further call is a round trip.

    called          no further step is scheduled; the swap is queued behind the step in flight
    core is idle    the step's tokens are out, labelled with the old version: caches are reset, the new
                    version is set, and the scheduler resumes while the device still copies

Data-parallel ranks with spread experts swap before the same step: each computes with the experts of all.

Caches that depend on weights:

    KV cache blocks    Their hash starts with the version at which their request started; a request without
                       blocks is rehashed when the version changes. So no request finds blocks of another
                       version. Only a request that has output tokens at a commit with `kv_cache: keep`
                       continues with blocks of both; one in its prompt is recomputed.
    encoder outputs    Dropped with every commit; running requests that still need them are recomputed.
    processed inputs   (pixels) Kept: they do not depend on weights. Half of that cache is in the client, and
                       dropping one half fails the next request with the same image.
"""

import sys
import time
from concurrent.futures import Future
from typing import Any

from deployments.replica import continuation

COMMIT = "slipstream_commit"
DRAIN = "slipstream_drain"
RUNNING = "slipstream_running"
END_DRAIN = "slipstream_end_drain"
RESET_CACHES = "slipstream_reset_caches"
STOP_DRAFTING = "slipstream_stop_drafting"
PROOF = "slipstream-proof-"


def install() -> None:
    module: Any = sys.modules.get("vllm.v1.engine.core")
    if module is None:
        return
    utilities = {
        COMMIT: commit,
        DRAIN: drain,
        RUNNING: running,
        END_DRAIN: end_drain,
        RESET_CACHES: reset_caches,
        STOP_DRAFTING: stop_drafting,
    }
    for name, utility in utilities.items():
        setattr(module.EngineCoreProc, name, utility)
    for replacement in (preprocess_add_request, add_request, set_weight_version):
        setattr(module.EngineCoreProc, replacement.__name__, replacement)


def commit(core: Any, version: str, recompute: bool, resume: bool) -> "Future[float] | float":
    """Returns the seconds of the workers' swap."""
    from vllm.v1.engine import EngineCoreRequestType

    if hasattr(core, "dp_group"):
        return _commit_before_same_step(core, version, recompute, resume)
    swap_s = _swap(core)

    def finish(core: Any) -> float:
        reset_caches(core, recompute)
        core.set_weight_version(version)
        if resume:
            core.resume_scheduler()
        return swap_s

    if not core.has_work():
        return finish(core)
    done: Future[float] = Future()

    def when_idle(core: Any) -> None:
        try:
            done.set_result(finish(core))
        except Exception as error:  # the caller decides
            done.set_exception(error)
        # The core now blocks on its input queue, unaware of new work.
        core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    core._idle_state_callbacks.append(when_idle)
    return done


def _swap(core: Any) -> float:
    from vllm.v1.core.sched.interface import PauseState

    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    begin = time.perf_counter()
    # Workers run calls in order: this one follows the step in flight.
    core.model_executor.collective_rpc("finish_weight_update")
    return time.perf_counter() - begin


def _commit_before_same_step(core: Any, version: str, recompute: bool, resume: bool) -> "Future[float]":
    """For one of several data-parallel ranks.

    vLLM's ranks agree every `dp_sync_interval` steps whether all of them pause. The commit is agreed upon in
    the same way, but requests are scheduled until then. An idle group agrees after one dummy step.
    """
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine.core import EngineCoreProc

    if core.pending_pause:  # the ranks could agree on the one or on the other
        raise RuntimeError("the scheduler is being paused")
    done: Future[float] = Future()

    def agree(has_unfinished: bool) -> bool:
        """Takes the place of vLLM's method; called by all ranks after the same step."""
        running: bool = type(core)._has_global_unfinished_reqs(core, has_unfinished)
        if core.pending_pause:
            return running
        del core._has_global_unfinished_reqs
        swap_s, failure = 0.0, None
        try:
            swap_s = _swap(core)
            while core.batch_queue:  # the last step's tokens are the old version's
                core._process_engine_step()
            reset_caches(core, recompute)
            core.set_weight_version(version)
            if resume:
                EngineCoreProc.resume_scheduler(core)
        except Exception as error:  # the caller decides
            failure = error
        running, all_swapped = core.vllm_config.parallel_config.sync_dp_state(
            core.dp_group,
            has_unfinished=core.scheduler.has_unfinished_requests(),
            pending_pause=failure is None,
        )
        if not all_swapped:  # no step may use experts of both versions
            core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            failure = failure or RuntimeError("another data-parallel rank did not swap")
        core.ignore_start_dp_wave = not (resume and all_swapped)
        if failure is None:
            done.set_result(swap_s)
        else:
            done.set_exception(failure)
        return running and all_swapped

    core._has_global_unfinished_reqs = agree
    core.pending_pause = core.engines_running = True
    return done


def drain(core: Any) -> int:
    """Returns the number of running requests. (vLLM's pause with `mode=wait` cannot be cancelled.)"""
    from vllm.v1.core.sched.interface import PauseState

    core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    return running(core)


def running(core: Any) -> int:
    """Those that have started, including preempted ones."""
    scheduler = core.scheduler
    if scheduler.pause_state.name == "PAUSED_NEW":
        # In this state only `kv_holding_waiting` is scheduled, without preempted requests.
        preempted = [each for each in scheduler.waiting if each.status.name == "PREEMPTED"]
        scheduler.waiting.remove_requests(preempted)
        for request in preempted:
            scheduler.kv_holding_waiting.add_request(request)
    count = len(scheduler.running) + len(scheduler.kv_holding_waiting)
    return count if count else int(bool(core.batch_queue))  # the last step's output is pending


def end_drain(core: Any, paused: bool) -> None:
    """`paused`: by a user."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine import EngineCoreOutputs

    core.scheduler.set_pause_state(PauseState.PAUSED_ALL if paused else PauseState.UNPAUSED)
    waits = core.scheduler.has_unfinished_requests()
    if waits and hasattr(core, "current_wave") and not core.engines_running:
        # Data-parallel ranks step together: the coordinator wakes the others.
        core.engines_running = True
        core.output_queue.put_nowait((-1, EngineCoreOutputs(start_wave=core.current_wave)))


def preprocess_add_request(core: Any, request: Any) -> tuple[Any, int]:
    """Replaces vLLM's; salts block hashes and continues what another replica began. Runs on the input thread,
    beside the steps."""
    from vllm.v1.engine.core import EngineCore

    request.cache_salt = _salt(core._weight_version, request.cache_salt or "")
    prepared: tuple[Any, int] = EngineCore.preprocess_add_request(core, request)
    continuation.resume(core, prepared[0])
    return prepared


def add_request(core: Any, request: Any, request_wave: int = 0) -> None:
    """Replaces vLLM's; like version changes it runs between two steps."""
    from vllm.v1.engine.core import EngineCore

    _salt_again(request, core._weight_version)
    EngineCore.add_request(core, request, request_wave)
    if request.request_id.startswith(PROOF):  # a short prompt; a long queue would cost it the next version
        core.scheduler.waiting.remove_request(request)
        core.scheduler.waiting.prepend_request(request)


def set_weight_version(core: Any, weight_version: str) -> None:
    """Replaces vLLM's; rehashes requests without blocks, which will be computed with the new weights. Ends
    `stop_drafting`."""
    from vllm.v1.engine.core import EngineCore

    EngineCore.set_weight_version(core, weight_version)
    if hasattr(core, "_drafts"):
        core.scheduler.dynamic_sd_lookup = core._drafts
        del core._drafts
    running = set(core.scheduler.running)
    for request in core.scheduler.requests.values():
        if request not in running and not core.scheduler._holds_kv_blocks(request):
            _salt_again(request, weight_version)


def stop_drafting(core: Any, version: str) -> None:
    """Until the next version, if this one is live.

    Uses vLLM's table of tokens to draft by the number of requests. What has been drafted is verified. A
    drafter's first pass still runs in each step: its KV cache is complete when it drafts again."""
    scheduler = core.scheduler
    if core._weight_version == version and not hasattr(core, "_drafts"):
        core._drafts = scheduler.dynamic_sd_lookup
        scheduler.dynamic_sd_lookup = [0] * (scheduler.max_num_running_reqs + 1)


def reset_caches(core: Any, recompute: bool) -> None:
    """Call it before `set_weight_version`, in the same pause."""
    scheduler = core.scheduler
    # vLLM keeps routed experts by block hash, and cannot follow a request whose hashes change.
    if recompute or scheduler.aux_output_connector is not None:
        if not scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise RuntimeError("the KV connector did not reset its cache")
    else:
        # A request without output tokens would be labelled with the new version alone, but use KV of both.
        cached = scheduler.encoder_cache_manager.get_cached_input_ids
        _compute_again(
            scheduler, [each for each in scheduler.running if not each.num_output_tokens or cached(each)]
        )
        scheduler.reset_prefix_cache()  # no effect while a request holds blocks
    scheduler.reset_encoder_cache()
    core.model_executor.reset_encoder_cache()


def _compute_again(scheduler: Any, requests: list[Any]) -> None:
    for request in reversed(requests):
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def _salt(version: str, own: str) -> str:
    return f"{version}/{own}"


def _salt_again(request: Any, version: str) -> None:
    salt = _salt(version, request.cache_salt.split("/", 1)[1])
    if request.cache_salt != salt:
        request.cache_salt = salt
        request.block_hashes.clear()
        request.update_block_hashes()
