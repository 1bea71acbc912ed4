"""The commit inside vLLM's engine core, between two decoding steps, and the drain before it.

Utilities beside vLLM's own (`pause_scheduler`, `collective_rpc`, ...). A commit composed of those leaves the
device idle: `pause_scheduler` answers only when the device is idle, and each further call is a message to
the core and one back.

    called          no further step is scheduled; the swap is queued behind the step in flight
    core is idle    the step's tokens are out, labelled with the old version: caches are reset, the new
                    version is set, and the scheduler resumes while the device still copies

What an engine core has cached that depends on its weights:

    KV cache blocks    found by a hash that begins with the version at which their request began. The core
                       sets it, and sets it anew for each request that holds no block when the version
                       changes. So no request that begins at a version finds blocks of another one. A
                       request that has output tokens at a change with `kv_cache: keep` alone continues with
                       blocks of both; one in the middle of its prompt is computed again.
    encoder outputs    dropped with every change. Running requests that still need some are computed again.
    processed inputs   (pixels) do not depend on weights. They are kept: vLLM has one half of that cache here
                       and one in the client; dropping one half fails the next request with the same image.
"""

import sys
import time
from concurrent.futures import Future
from typing import Any

COMMIT = "slipstream_commit"  # its name among the engine core's utilities
DRAIN = "slipstream_drain"
RUNNING = "slipstream_running"
END_DRAIN = "slipstream_end_drain"
RESET_CACHES = "slipstream_reset_caches"


def install() -> None:
    """Called in every process that vLLM starts; does nothing outside of an engine core."""
    module: Any = sys.modules.get("vllm.v1.engine.core")
    if module is None:
        return
    utilities = {
        COMMIT: commit,
        DRAIN: drain,
        RUNNING: running,
        END_DRAIN: end_drain,
        RESET_CACHES: reset_caches,
    }
    for name, utility in utilities.items():
        setattr(module.EngineCoreProc, name, utility)
    for replacement in (preprocess_add_request, add_request, set_weight_version):
        setattr(module.EngineCoreProc, replacement.__name__, replacement)


def commit(core: Any, version: str, recompute: bool, resume: bool) -> "Future[float] | float":
    """Make the staged version the live one. Returns the seconds that the workers' swap took.

    Not for an engine with data-parallel ranks: those step until all of them are idle, and a step of one uses
    experts of the others.

    Args:
        core: vLLM's `EngineCoreProc`.
        recompute: running requests lose their KV cache and are computed again from their first token.
        resume: schedule again afterwards.
    """
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine import EngineCoreRequestType

    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    begin = time.perf_counter()
    # Workers carry calls out in order: this one comes directly behind the step in flight.
    core.model_executor.collective_rpc("finish_weight_update")
    swap_s = time.perf_counter() - begin

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
        # The core waits for a message now, and would not notice that there is work again.
        core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    core._idle_state_callbacks.append(when_idle)
    return done


# vLLM's own pause with `mode=wait` cannot be given up once it is asked for, and has no deadline.


def drain(core: Any) -> int:
    """Begin no request; those that run go on. Returns how many do."""
    from vllm.v1.core.sched.interface import PauseState

    core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    return running(core)


def running(core: Any) -> int:
    """Requests that have begun and not ended; also those that were preempted."""
    scheduler = core.scheduler
    if scheduler.pause_state.name == "PAUSED_NEW":
        # Only requests of the second queue go on in this state, which those that were preempted are not in.
        preempted = [each for each in scheduler.waiting if each.status.name == "PREEMPTED"]
        scheduler.waiting.remove_requests(preempted)
        for request in preempted:
            scheduler.kv_holding_waiting.add_request(request)
    count = len(scheduler.running) + len(scheduler.kv_holding_waiting)
    return count if count else int(bool(core.batch_queue))  # the last step's tokens are still to come


def end_drain(core: Any, paused: bool) -> None:
    """Begin requests again, or (`paused`) stop as a user's pause wants it."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine import EngineCoreOutputs

    core.scheduler.set_pause_state(PauseState.PAUSED_ALL if paused else PauseState.UNPAUSED)
    waits = core.scheduler.has_unfinished_requests()
    if waits and hasattr(core, "current_wave") and not core.engines_running:
        # Ranks of a data-parallel engine step together: the coordinator wakes the others.
        core.engines_running = True
        core.output_queue.put_nowait((-1, EngineCoreOutputs(start_wave=core.current_wave)))


def preprocess_add_request(core: Any, request: Any) -> tuple[Any, int]:
    """vLLM's; runs in the thread that receives requests, beside the steps. Salts the request's hashes."""
    from vllm.v1.engine.core import EngineCore

    request.cache_salt = _salt(core._weight_version, request.cache_salt or "")
    prepared: tuple[Any, int] = EngineCore.preprocess_add_request(core, request)
    return prepared


def add_request(core: Any, request: Any, request_wave: int = 0) -> None:
    """vLLM's; runs between two steps, as a change of the version does."""
    from vllm.v1.engine.core import EngineCore

    _salt_again(request, core._weight_version)
    EngineCore.add_request(core, request, request_wave)


def set_weight_version(core: Any, weight_version: str) -> None:
    """vLLM's. What has no block yet is computed with the new weights, also if it was received before."""
    from vllm.v1.engine.core import EngineCore

    EngineCore.set_weight_version(core, weight_version)
    running = set(core.scheduler.running)
    for request in core.scheduler.requests.values():
        if request not in running and not core.scheduler._holds_kv_blocks(request):
            _salt_again(request, weight_version)


def reset_caches(core: Any, recompute: bool) -> None:
    """Drop what was computed with weights that are replaced; before `set_weight_version`, in the same pause.

    Args:
        recompute: running requests lose their KV cache, too, and are computed again from their first token.
    """
    scheduler = core.scheduler
    if recompute:
        if not scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise RuntimeError("the KV connector did not reset its cache")
    else:
        # Without an output token, a request would have an answer of the new version alone, computed with keys
        # and values of both.
        _compute_again(
            scheduler,
            [
                each
                for each in scheduler.running
                if not each.num_output_tokens or _needs_encoder(scheduler, each)
            ],
        )
        scheduler.reset_prefix_cache()  # does nothing while a request holds blocks
    scheduler.reset_encoder_cache()
    core.model_executor.reset_encoder_cache()


def _needs_encoder(scheduler: Any, request: Any) -> bool:
    """Whether it has encoder outputs that it did not use up."""
    return bool(scheduler.encoder_cache_manager.get_cached_input_ids(request))


def _compute_again(scheduler: Any, requests: list[Any]) -> None:
    """Preempt requests; as vLLM's own reset of the prefix cache does with all."""
    for request in reversed(requests):
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def _salt(version: str, own: str) -> str:
    return f"{version}/{own}"


def _salt_again(request: Any, version: str) -> None:
    """Hash the request's blocks for this version, keeping the salt that its sender gave."""
    salt = _salt(version, request.cache_salt.split("/", 1)[1])
    if request.cache_salt != salt:
        request.cache_salt = salt
        request.block_hashes.clear()
        request.update_block_hashes()
