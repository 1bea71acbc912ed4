"""The commit inside vLLM's engine core, between two decoding steps.

A utility beside vLLM's own (`pause_scheduler`, `collective_rpc`, ...). A commit composed of those leaves the
device idle: `pause_scheduler` answers only when the device is idle, and each further call is a message to
the core and one back.

    called          no further step is scheduled; the swap is queued behind the step in flight
    core is idle    the step's tokens are out, labelled with the old version: caches are reset, the new
                    version is set, and the scheduler resumes while the device still copies
"""

import sys
import time
from concurrent.futures import Future
from typing import Any

COMMIT = "slipstream_commit"  # its name among the engine core's utilities


def install() -> None:
    """Called in every process that vLLM starts; does nothing outside of an engine core."""
    module: Any = sys.modules.get("vllm.v1.engine.core")
    if module is not None:
        setattr(module.EngineCoreProc, COMMIT, commit)


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
        if recompute:
            core._reset_caches()
        else:
            core.reset_prefix_cache()
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
