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
from app.http.route import GuardedRoute
from deployments.calls.rpc import CallHandle, retried
from deployments.protocol import engine_state
from deployments.protocol.adapters import LOAD_TIMEOUT_S, Adapter, LoadRequest
from deployments.protocol.engine_state import InFlight, SleepTag
from deployments.protocol.responses import AdapterList, Status

InFlightQuery = Annotated[InFlight, Query(description="what happens to running requests")]
_COUNTS = TypeAdapter(dict[str, int])  # per replica


class EngineRoutes:
    def __init__(self, controller: CallHandle) -> None:
        self._controller = controller

    def routes(self) -> list[GuardedRoute]:
        return [
            GuardedRoute("POST", "/pause", self.pause),
            GuardedRoute("POST", "/resume", self.resume),
            GuardedRoute("GET", "/is_paused", self.is_paused),
            GuardedRoute("POST", "/abort_requests", self.abort_requests, large=True),
            GuardedRoute("POST", "/sleep", self.sleep),
            GuardedRoute("POST", "/wake_up", self.wake_up),
            GuardedRoute("GET", "/is_sleeping", self.is_sleeping),
            GuardedRoute("POST", "/reset_prefix_cache", self.reset_prefix_cache),
            GuardedRoute("POST", "/v1/load_lora_adapter", self.load, response_class=PlainTextResponse),
            GuardedRoute("POST", "/v1/unload_lora_adapter", self.unload, response_class=PlainTextResponse),
            GuardedRoute("POST", "/load_lora_adapter", self.load_in_place),
            GuardedRoute("GET", "/fleet/adapters", self.adapters),
        ]

    async def pause(
        self,
        mode: InFlightQuery = InFlight.ABORT,
        clear_cache: Annotated[bool, Query(description="discard the KV cache")] = True,
    ) -> Status:
        """Stop generating; requests that arrive wait."""
        await self._call(engine_state.Pause(mode=mode, clear_cache=clear_cache))
        return Status(status="paused")

    async def resume(self) -> Status:
        """Continue generating."""
        await self._call(engine_state.Resume())
        return Status(status="resumed")

    async def is_paused(self) -> dict[str, bool]:
        """Whether every replica is paused."""
        return {"is_paused": all((await self._call(engine_state.IsPaused())).values())}

    async def abort_requests(self, body: AbortRequestsBody) -> dict[str, str | int]:
        """Abort running requests, by id or all of them."""
        ids = None if body.request_ids is None else tuple(body.request_ids)
        counts = _COUNTS.validate_python(await self._call(engine_state.AbortRequests(request_ids=ids)))
        # vLLM counts the given ids, running or not.
        aborted = len(ids) if ids else sum(counts.values())
        return {"status": "aborted", "aborted": aborted}

    async def sleep(
        self,
        body: SleepBody,
        level: Annotated[int | None, Query(ge=0, le=2, description="1 where none is given")] = None,
        mode: InFlightQuery | None = None,
    ) -> dict[str, str | int]:
        """Free GPU memory. Refused while a round is open.

        Level 1 keeps the weights in host memory. Level 2 discards them: a round must bring new ones before
        the KV cache wakes.
        """
        chosen = next(each for each in (level, body.level, 1) if each is not None)
        await self._call(engine_state.Sleep(level=chosen, mode=mode or body.mode or InFlight.ABORT))
        return {"status": "sleeping", "level": chosen}

    async def wake_up(
        self,
        body: WakeUpBody,
        tags: Annotated[tuple[SleepTag, ...], Query(description="the parts to wake; none of them: all")] = (),
    ) -> dict[str, str | Sequence[SleepTag] | None]:
        """Wake all parts, or those in `tags`.

        Refused if the weights were discarded by a sleep at level 2.
        """
        # vLLM fails on a repeated tag.
        named = tags or body.tags
        distinct = tuple(dict.fromkeys(named)) if named else None
        awake = all((await self._call(engine_state.WakeUp(tags=distinct))).values())
        return {"status": "awake" if awake else "sleeping", "tags": named or None}

    async def is_sleeping(self) -> dict[str, bool]:
        """Whether every replica is asleep."""
        return {"is_sleeping": all((await self._call(engine_state.IsSleeping())).values())}

    async def reset_prefix_cache(
        self,
        body: ResetPrefixCacheBody,
        reset_running_requests: Annotated[bool, Query(description="as in the body")] = False,
        reset_external: Annotated[bool, Query(description="as in the body")] = False,
    ) -> dict[str, bool]:
        """Discard cached prefixes; flags come in the query or the body.

        `success` is false, as in vLLM, if running requests or a connector hold blocks on some replica.
        """
        answers = await self._call(
            engine_state.ResetPrefixCache(
                reset_running_requests=reset_running_requests or body.reset_running_requests,
                reset_connector=reset_external or body.reset_external,
            )
        )
        return {"success": all(answers.values())}

    async def load(self, body: LoadAdapterBody) -> PlainTextResponse:
        """Load an adapter into every replica, as the next version of its name."""
        full_name = await self._load(body, in_place=body.load_inplace)
        return PlainTextResponse(
            f"Success: LoRA adapter '{body.lora_name}' added successfully.",
            headers={"x-adapter": full_name} if full_name.isascii() else None,
        )

    async def unload(self, body: UnloadAdapterBody) -> PlainTextResponse:
        """Unload all versions of a name, or one `name@version`. Running requests finish on theirs."""
        await self._controller.unload_adapter.remote(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def load_in_place(self, body: LoadAdapterBody) -> Status:
        """prime-rl's route: load a version of a name that may be live."""
        await self._load(body, in_place=True)
        return Status(status="ok")

    async def adapters(self) -> AdapterList:
        """Versions that are live, loading, or still used by running requests."""
        return AdapterList(adapters=await self._controller.adapters.remote())

    async def _load(self, body: LoadAdapterBody, *, in_place: bool) -> str:
        """Load an adapter; returns its full name. If the controller dies, its successor is asked for the same
        load, and knows whether it was decided."""
        load = LoadRequest(
            name=body.lora_name,
            path=body.lora_path,
            in_place=in_place,
            is_3d=body.is_3d_lora_weight,
            load_id=uuid.uuid4().hex,
        )
        adapter: Adapter = await retried(self._controller, "load_adapter", load, limit_s=LOAD_TIMEOUT_S)
        return adapter.full_name

    async def _call(self, operation: engine_state.Operation) -> Mapping[str, JsonValue]:
        return await self._controller.call.remote(operation)
