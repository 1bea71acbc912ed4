"""vLLM 0.32's routes that pause, sleep and reset an engine, and those of its LoRA adapters, on every replica.

Names, parameters and responses follow `entrypoints/rl/online`, `entrypoints/serve/dev` and
`entrypoints/serve/lora`. 200 means all replicas did it.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated

from fastapi import Query
from pydantic import JsonValue, TypeAdapter
from starlette.responses import PlainTextResponse

from app.http.requests import (
    AbortRequestsBody,
    LoadAdapterBody,
    ResetPrefixCacheBody,
    SleepBody,
    UnloadAdapterBody,
    WakeUpBody,
)
from app.http.route import Controller, Routes
from deployments.calls.rpc import CallHandle, retried
from deployments.protocol import engine_state
from deployments.protocol.adapters import LOAD_TIMEOUT_S, Adapter, LoadRequest
from deployments.protocol.engine_state import InFlight, SleepTag
from deployments.protocol.responses import AdapterList, Status

InFlightQuery = Annotated[InFlight, Query(description="what happens to running requests")]
_COUNTS = TypeAdapter(dict[str, int])  # per replica


routes = Routes()


@routes("POST", "/pause")
async def pause(
    controller: Controller,
    mode: InFlightQuery = InFlight.ABORT,
    clear_cache: Annotated[bool, Query(description="discard the KV cache")] = True,
) -> Status:
    """Stop generating; requests that arrive wait."""
    await _call(controller, engine_state.Pause(mode=mode, clear_cache=clear_cache))
    return Status(status="paused")


@routes("POST", "/resume")
async def resume(controller: Controller) -> Status:
    """Continue generating."""
    await _call(controller, engine_state.Resume())
    return Status(status="resumed")


@routes("GET", "/is_paused")
async def is_paused(controller: Controller) -> dict[str, bool]:
    """Whether every replica is paused."""
    return {"is_paused": all((await _call(controller, engine_state.IsPaused())).values())}


@routes("POST", "/abort_requests", large=True)
async def abort_requests(controller: Controller, body: AbortRequestsBody) -> dict[str, str | int]:
    """Abort running requests, by id or all of them."""
    ids = None if body.request_ids is None else tuple(body.request_ids)
    counts = _COUNTS.validate_python(await _call(controller, engine_state.AbortRequests(request_ids=ids)))
    # vLLM counts the given ids, running or not.
    aborted = len(ids) if ids else sum(counts.values())
    return {"status": "aborted", "aborted": aborted}


@routes("POST", "/sleep")
async def sleep(
    controller: Controller,
    body: SleepBody,
    level: Annotated[int | None, Query(ge=0, le=2, description="1 where none is given")] = None,
    mode: InFlightQuery | None = None,
) -> dict[str, str | int]:
    """Free GPU memory. Refused while a round is open.

    Level 1 keeps the weights in host memory. Level 2 discards them: a round must bring new ones before
    the KV cache wakes.
    """
    chosen = next(each for each in (level, body.level, 1) if each is not None)
    await _call(controller, engine_state.Sleep(level=chosen, mode=mode or body.mode or InFlight.ABORT))
    return {"status": "sleeping", "level": chosen}


@routes("POST", "/wake_up")
async def wake_up(
    controller: Controller,
    body: WakeUpBody,
    tags: Annotated[tuple[SleepTag, ...], Query(description="the parts to wake; none of them: all")] = (),
) -> dict[str, str | Sequence[SleepTag] | None]:
    """Wake all parts, or those in `tags`.

    Refused if the weights were discarded by a sleep at level 2.
    """
    # vLLM fails on a repeated tag.
    named = tags or body.tags
    distinct = tuple(dict.fromkeys(named)) if named else None
    awake = all((await _call(controller, engine_state.WakeUp(tags=distinct))).values())
    return {"status": "awake" if awake else "sleeping", "tags": named or None}


@routes("GET", "/is_sleeping")
async def is_sleeping(controller: Controller) -> dict[str, bool]:
    """Whether every replica is asleep."""
    return {"is_sleeping": all((await _call(controller, engine_state.IsSleeping())).values())}


@routes("POST", "/reset_prefix_cache")
async def reset_prefix_cache(
    controller: Controller,
    body: ResetPrefixCacheBody,
    reset_running_requests: Annotated[bool, Query(description="as in the body")] = False,
    reset_external: Annotated[bool, Query(description="as in the body")] = False,
) -> dict[str, bool]:
    """Discard cached prefixes; flags come in the query or the body.

    `success` is false, as in vLLM, if running requests or a connector hold blocks on some replica.
    """
    answers = await _call(
        controller,
        engine_state.ResetPrefixCache(
            reset_running_requests=reset_running_requests or body.reset_running_requests,
            reset_connector=reset_external or body.reset_external,
        ),
    )
    return {"success": all(answers.values())}


@routes("POST", "/v1/load_lora_adapter", response_class=PlainTextResponse)
async def load(controller: Controller, body: LoadAdapterBody) -> PlainTextResponse:
    """Load an adapter into every replica, as the next version of its name."""
    full_name = await _load(controller, body, in_place=body.load_inplace)
    return PlainTextResponse(
        f"Success: LoRA adapter '{body.lora_name}' added successfully.",
        headers={"x-adapter": full_name} if full_name.isascii() else None,
    )


@routes("POST", "/v1/unload_lora_adapter", response_class=PlainTextResponse)
async def unload(controller: Controller, body: UnloadAdapterBody) -> PlainTextResponse:
    """Unload all versions of a name, or one `name@version`. Running requests finish on theirs."""
    await controller.unload_adapter.remote(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@routes("POST", "/load_lora_adapter")
async def load_in_place(controller: Controller, body: LoadAdapterBody) -> Status:
    """prime-rl's route: load a version of a name that may be live."""
    await _load(controller, body, in_place=True)
    return Status(status="ok")


@routes("GET", "/fleet/adapters")
async def adapters(controller: Controller) -> AdapterList:
    """Versions that are live, loading, or still used by running requests."""
    return AdapterList(adapters=await controller.adapters.remote())


async def _load(controller: CallHandle, body: LoadAdapterBody, *, in_place: bool) -> str:
    """Load an adapter; returns its full name. If the controller dies, its successor gets the same load, and
    knows whether it was decided."""
    load = LoadRequest(
        name=body.lora_name,
        path=body.lora_path,
        in_place=in_place,
        is_3d=body.is_3d_lora_weight,
        load_id=uuid.uuid4().hex,
    )
    adapter: Adapter = await retried(controller, "load_adapter", load, limit_s=LOAD_TIMEOUT_S)
    return adapter.full_name


async def _call(controller: CallHandle, operation: engine_state.Operation) -> Mapping[str, JsonValue]:
    return await controller.call.remote(operation)
