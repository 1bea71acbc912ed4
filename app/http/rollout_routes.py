"""Routes of captured rollouts: agents and their environments reward or discard them, trainers take them."""

import uuid
from typing import Annotated, Any

from fastapi import Path, Request, Response

from app.http.auth import Access, Guard
from app.http.requests import BeginBody, RewardBody, SettleBody, TakeBody
from app.http.route import GuardedRoute
from deployments.calls.rpc import CallHandle, retried
from deployments.protocol.errors import InvalidRequest
from deployments.protocol.responses import BegunGroup, RolloutCounts, RunPosition, Status
from deployments.protocol.rollouts import (
    CONTINUE_HEADER,
    DEADLINE_HEADER,
    GROUP_HEADER,
    ID_HEADER,
    REQUEST_HEADER,
    SIZE_HEADER,
    Reward,
    TurnId,
    check_id,
    rollout_of,
)

LIMIT_S = 90.0  # more than the controller waits for its disk
RolloutId = Annotated[str, Path(description="the `x-rollout-id` of its requests")]


async def begin_rollout(controller: CallHandle, guard: Guard, request: Request, path: str) -> TurnId:
    """Open the rollout that a request's headers name. Raises SlipstreamError: wrong headers, or the rollout
    takes no turn of this request."""
    once = (ID_HEADER, GROUP_HEADER, SIZE_HEADER, DEADLINE_HEADER, REQUEST_HEADER, CONTINUE_HEADER)
    for name in once:
        if len(values := request.headers.getlist(name)) > 1:
            raise InvalidRequest(f"{name} must come once, got {values}")
    rollout = rollout_of(request.headers, guard.owner(request), path)
    turn = check_id(REQUEST_HEADER, request.headers.get(REQUEST_HEADER, uuid.uuid4().hex))
    await retried(controller, "rollouts", "open", rollout, limit_s=LIMIT_S)
    return TurnId(rollout_id=rollout.rollout_id, owner=rollout.owner, request=turn, attempt=0)


class RolloutRoutes:
    def __init__(self, controller: CallHandle) -> None:
        self._controller = controller

    def routes(self) -> list[GuardedRoute]:
        return [
            GuardedRoute("GET", "/rollouts", self.counts),
            GuardedRoute("GET", "/rollouts/runs/{run}", self.position),
            GuardedRoute("POST", "/rollouts/begin", self.begin, repeatable=True),
            GuardedRoute("POST", "/rollouts/settle", self.settle, large=True, repeatable=True),
            GuardedRoute("POST", "/rollouts/take", self.take, repeatable=True, response_class=Response),
            GuardedRoute(
                "POST", "/rollouts/{rollout_id}/reward", self.reward, access=Access.USER, large=True
            ),
            GuardedRoute("POST", "/rollouts/{rollout_id}/discard", self.discard, access=Access.USER),
        ]

    async def counts(self) -> RolloutCounts:
        """How many rollouts are kept, by state, and how many groups came to an end, by reason."""
        states, ends = await self._call("counts")
        return RolloutCounts(states=states, ends=ends)

    async def position(self, run: str) -> RunPosition:
        """Which groups a job has begun, and what became of them; nothing of one that is unknown."""
        known, opened, ready = await self._call("position", run)
        return RunPosition(next=known.next, open=opened, ready=ready, ends=known.ends)

    async def begin(self, body: BeginBody) -> BegunGroup:
        """Open the next group of a job, for requests with its name in `x-rollout-group`."""
        return BegunGroup(group=await self._call("begin", body.run, body.number))

    async def settle(self, body: SettleBody) -> Status:
        """Reward members of a group, discard the others, and close it. The same call again is harmless."""
        rewards = {each.id: (_reward(each.reward), each.info) for each in body.rollouts}
        await self._call("settle", body.group, rewards, body.reason)
        return Status(status="settled")

    async def take(self, body: TakeBody) -> Response:
        """A step consumes closed groups, the oldest first: their tokens, log-probabilities and rewards.

        The same call again gets the same groups. `step` is null while there are fewer than it asks for.
        """
        content: bytes = await self._call(
            "take", body.step, body.run, body.groups, body.max_staleness, body.note
        )
        return Response(content, media_type="application/json")

    async def reward(self, rollout_id: RolloutId, body: RewardBody, request: Request) -> Status:
        """Reward a rollout, which then takes no more turns."""
        owner = request.app.state.guard.owner(request)
        await self._call("reward", rollout_id, owner, _reward(body.reward), body.key)
        return Status(status="rewarded")

    async def discard(self, rollout_id: RolloutId, request: Request) -> Status:
        """Discard a rollout: nobody learns from it. May be repeated."""
        await self._call("discard", rollout_id, request.app.state.guard.owner(request))
        return Status(status="discarded")

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await retried(self._controller, "rollouts", name, *arguments, limit_s=LIMIT_S)


def _reward(given: float | list[float | list[float]]) -> Reward:
    if not isinstance(given, list):
        return given
    return tuple(tuple(each) if isinstance(each, list) else each for each in given)
