"""vLLM 0.32's routes that pause, sleep and reset an engine, applied to every replica.

Names, parameters and responses follow `entrypoints/rl/online` and `entrypoints/serve/dev`. 200 means all
replicas did it.
"""

from collections.abc import Mapping
from typing import Annotated

from fastapi import Query
from pydantic import JsonValue, TypeAdapter

from app.http.requests import (
    AbortRequestsBody,
    ResetPrefixCacheBody,
    SleepBody,
    WakeUpBody,
)
from app.http.route import GuardedRoute
from deployments.calls.rpc import CallHandle
from deployments.protocol import engine_state, responses
from deployments.protocol.engine_state import InFlight, SleepTag

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
        ]

    async def pause(
        self,
        mode: InFlightQuery = InFlight.ABORT,
        clear_cache: Annotated[bool, Query(description="discard the KV cache")] = True,
    ) -> responses.Status:
        """Stop generating; requests that arrive wait."""
        await self._call(engine_state.Pause(mode=mode, clear_cache=clear_cache))
        return responses.Status(status="paused")

    async def resume(self) -> responses.Status:
        """Continue generating."""
        await self._call(engine_state.Resume())
        return responses.Status(status="resumed")

    async def is_paused(self) -> responses.PauseState:
        """Whether every replica is paused."""
        return responses.PauseState(is_paused=all((await self._call(engine_state.IsPaused())).values()))

    async def abort_requests(self, body: AbortRequestsBody) -> responses.AbortedRequests:
        """Abort running requests, by id or all of them."""
        ids = None if body.request_ids is None else tuple(body.request_ids)
        counts = _COUNTS.validate_python(await self._call(engine_state.AbortRequests(request_ids=ids)))
        # vLLM counts the given ids, running or not.
        aborted = len(ids) if ids else sum(counts.values())
        return responses.AbortedRequests(status="aborted", aborted=aborted)

    async def sleep(
        self,
        body: SleepBody,
        level: Annotated[int | None, Query(ge=0, le=2, description="1 where none is given")] = None,
        mode: InFlightQuery | None = None,
    ) -> responses.FellAsleep:
        """Free GPU memory. Refused while a round is open.

        Level 1 keeps the weights in host memory. Level 2 discards them: a round must bring new ones before
        the KV cache wakes.
        """
        chosen = next(each for each in (level, body.level, 1) if each is not None)
        await self._call(engine_state.Sleep(level=chosen, mode=mode or body.mode or InFlight.ABORT))
        return responses.FellAsleep(status="sleeping", level=chosen)

    async def wake_up(
        self,
        body: WakeUpBody,
        tags: Annotated[tuple[SleepTag, ...], Query(description="the parts to wake; none of them: all")] = (),
    ) -> responses.WokeUp:
        """Wake all parts, or those in `tags`.

        Refused if the weights were discarded by a sleep at level 2.
        """
        # vLLM fails on a repeated tag.
        named = tags or body.tags
        distinct = tuple(dict.fromkeys(named)) if named else None
        awake = all((await self._call(engine_state.WakeUp(tags=distinct))).values())
        return responses.WokeUp(status="awake" if awake else "sleeping", tags=named or None)

    async def is_sleeping(self) -> responses.SleepState:
        """Whether every replica is asleep."""
        return responses.SleepState(is_sleeping=all((await self._call(engine_state.IsSleeping())).values()))

    async def reset_prefix_cache(
        self,
        body: ResetPrefixCacheBody,
        reset_running_requests: Annotated[bool, Query(description="as in the body")] = False,
        reset_external: Annotated[bool, Query(description="as in the body")] = False,
    ) -> responses.Success:
        """Discard cached prefixes; flags come in the query or the body.

        `success` is false, as in vLLM, if running requests or a connector hold blocks on some replica.
        """
        answers = await self._call(
            engine_state.ResetPrefixCache(
                reset_running_requests=reset_running_requests or body.reset_running_requests,
                reset_connector=reset_external or body.reset_external,
            )
        )
        return responses.Success(success=all(answers.values()))

    async def _call(self, operation: engine_state.Operation) -> Mapping[str, JsonValue]:
        return await self._controller.call.remote(operation)
