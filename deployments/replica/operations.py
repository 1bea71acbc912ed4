"""vLLM's RL operations on one engine."""

from pydantic import JsonValue

from deployments.condition import MEMORY_TAGS
from deployments.protocol.operations import (
    AbortRequests,
    Disconnect,
    IsPaused,
    IsSleeping,
    Operation,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    WakeUp,
    WeightChecksums,
)
from deployments.replica.engine import Engine


async def carry_out(engine: Engine, operation: Operation) -> JsonValue:
    """Carry an operation out; its answer as vLLM's route has it."""
    match operation:
        case Pause():
            await engine.pause(operation)
        case Resume():
            await engine.resume()
        case IsPaused():
            return bool(await engine.llm.is_paused())
        case Sleep():
            await engine.sleep(operation)
        case WakeUp():
            await engine.wake_up(operation)
            return not engine.asleep & MEMORY_TAGS  # as vLLM, which asks its executor
        case IsSleeping():
            return bool(await engine.llm.is_sleeping())
        case ResetPrefixCache():
            return await _reset_prefix_cache(engine, operation)
        case AbortRequests():
            return await _abort_requests(engine, operation)
        case WeightChecksums():
            checksums: list[JsonValue] = [dict(each) for each in await engine.llm.compute_weight_checksums()]
            return checksums
        case Disconnect():
            await engine.workers("shutdown_weight_transfer_engine")
    return None


async def _reset_prefix_cache(engine: Engine, operation: ResetPrefixCache) -> bool:
    return bool(
        await engine.llm.reset_prefix_cache(
            reset_running_requests=operation.reset_running_requests,
            reset_connector=operation.reset_connector,
        )
    )


async def _abort_requests(engine: Engine, operation: AbortRequests) -> int:
    """How many requests were aborted."""
    if operation.request_ids:
        await engine.llm.abort(list(operation.request_ids))
        return len(operation.request_ids)
    processor = engine.llm.output_processor
    running = [*processor.request_states, *processor.parent_requests]
    await engine.llm.abort(running, internal=True)
    return len(running)
