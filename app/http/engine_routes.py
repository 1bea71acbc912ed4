"""vLLM 0.32's routes that pause, put to sleep and reset an engine, carried out on every replica.

Same names, parameters and answers as vLLM's routers in `entrypoints/rl/online` and `entrypoints/serve/dev`.
An answer of 200 means that every replica did it.
"""

from collections.abc import Mapping

from pydantic import JsonValue, TypeAdapter

from app.http.answers import AbortedRequests, FellAsleep, PauseState, SleepState, Status, Success, WokeUp
from app.http.endpoint import Endpoint
from app.http.requests import (
    AbortRequestsBody,
    PauseQuery,
    ResetPrefixCacheBody,
    ResetPrefixCacheQuery,
    SleepBody,
    SleepQuery,
    WakeUpBody,
    WakeUpQuery,
)
from deployments.protocol.operations import (
    AbortRequests,
    IsPaused,
    IsSleeping,
    Operation,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    WakeUp,
)
from deployments.unary import UnaryHandle

_COUNTS = TypeAdapter(dict[str, int])  # by replica


class EngineRoutes:
    """The routes of the engines' state."""

    def __init__(self, controller: UnaryHandle, max_body_bytes: int) -> None:
        self._controller = controller
        self._max_body_bytes = max_body_bytes

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("POST", "/pause", self.pause),
            Endpoint("POST", "/resume", self.resume),
            Endpoint("GET", "/is_paused", self.is_paused),
            Endpoint("POST", "/abort_requests", self.abort_requests, max_body_bytes=self._max_body_bytes),
            Endpoint("POST", "/sleep", self.sleep),
            Endpoint("POST", "/wake_up", self.wake_up),
            Endpoint("GET", "/is_sleeping", self.is_sleeping),
            Endpoint("POST", "/reset_prefix_cache", self.reset_prefix_cache),
        ]

    async def pause(self, query: PauseQuery) -> Status:
        """Stop generating; requests that arrive wait.

        Raises:
            Conflict: with mode `wait`, requests ran for too long, or another call came; nothing changed.
        """
        await self._call(Pause(mode=query.mode, clear_cache=query.clear_cache))
        return Status(status="paused")

    async def resume(self) -> Status:
        """Continue generating."""
        await self._call(Resume())
        return Status(status="resumed")

    async def is_paused(self) -> PauseState:
        """Whether every replica is paused."""
        return PauseState(is_paused=all((await self._call(IsPaused())).values()))

    async def abort_requests(self, body: AbortRequestsBody) -> AbortedRequests:
        """Abort running requests, by id or all of them."""
        counts = _COUNTS.validate_python(await self._call(AbortRequests(request_ids=body.request_ids)))
        # vLLM counts the ids that it was given, whether such requests run or not; each replica is given all.
        aborted = len(body.request_ids) if body.request_ids else sum(counts.values())
        return AbortedRequests(status="aborted", aborted=aborted)

    async def sleep(self, query: SleepQuery, body: SleepBody) -> FellAsleep:
        """Free GPU memory.

        At level 1 the weights wait in host memory; at level 2 they are discarded, and a round has to bring
        new ones before the KV cache wakes. Refused while a round is open.

        Raises:
            Conflict: a round is open; or, with mode `wait`, as for a pause.
        """
        chosen = SleepQuery(**body.model_dump(exclude_none=True) | query.model_dump(exclude_unset=True))
        await self._call(Sleep(level=chosen.level, mode=chosen.mode))
        return FellAsleep(status="sleeping", level=chosen.level)

    async def wake_up(self, query: WakeUpQuery, body: WakeUpBody) -> WokeUp:
        """Wake all parts, or those in `tags`.

        Refused if the fleet would compute with weights that a sleep at level 2 discarded.

        Raises:
            Conflict: the weights are discarded, and no round has brought new ones.
        """
        # Each once: a repeated tag is an error in the middle of vLLM's own bookkeeping.
        named = query.tags or body.tags
        tags = tuple(dict.fromkeys(named)) if named else None
        awake = all((await self._call(WakeUp(tags=tags))).values())
        return WokeUp(status="awake" if awake else "sleeping", tags=named or None)

    async def is_sleeping(self) -> SleepState:
        """Whether every replica is asleep."""
        return SleepState(is_sleeping=all((await self._call(IsSleeping())).values()))

    async def reset_prefix_cache(self, query: ResetPrefixCacheQuery, body: ResetPrefixCacheBody) -> Success:
        """Discard the cached prefixes; the flags come in the query or in a body.

        Without success on every replica, as vLLM: running requests hold blocks there, or a connector does.
        """
        answers = await self._call(
            ResetPrefixCache(
                reset_running_requests=query.reset_running_requests or body.reset_running_requests,
                reset_connector=query.reset_external or body.reset_external,
            )
        )
        return Success(success=all(answers.values()))

    async def _call(self, operation: Operation) -> Mapping[str, JsonValue]:
        answers: Mapping[str, JsonValue] = await self._controller.call.remote(operation)
        return answers
