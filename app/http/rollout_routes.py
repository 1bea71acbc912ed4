"""Routes of captured rollouts: agents and their environments reward or discard them, trainers take them."""

import uuid
from typing import Annotated, Any

from fastapi import Path, Query, Request, Response

from app.http.auth import Access, Guard
from app.http.requests import ConsumeBody, RewardBody
from app.http.route import GuardedRoute
from deployments.calls.rpc import CallHandle, bounded, retried
from deployments.protocol.errors import InvalidRequest
from deployments.protocol.responses import ConsumedRollouts, RolloutCounts, Status
from deployments.protocol.rollouts import (
    DEADLINE_HEADER,
    GROUP_HEADER,
    ID_HEADER,
    SIZE_HEADER,
    Reward,
    TurnId,
    rollout_of,
)

LIMIT_S = 90.0  # more than the controller waits for its disk
MAX_GROUPS = 4096
RolloutId = Annotated[str, Path(description="the `x-rollout-id` of its requests")]


async def begin_rollout(controller: CallHandle, guard: Guard, request: Request, path: str) -> TurnId:
    """Open the rollout that a request's headers name. Raises SlipstreamError: wrong headers, or the rollout
    takes no turn of this request."""
    for name in (ID_HEADER, GROUP_HEADER, SIZE_HEADER, DEADLINE_HEADER):
        if len(values := request.headers.getlist(name)) > 1:
            raise InvalidRequest(f"{name} must come once, got {values}")
    rollout = rollout_of(request.headers, guard.owner(request), path)
    await retried(controller, "rollouts", "open", rollout, limit_s=LIMIT_S)
    return TurnId(rollout_id=rollout.rollout_id, owner=rollout.owner, request=uuid.uuid4().hex, attempt=0)


class RolloutRoutes:
    def __init__(self, controller: CallHandle) -> None:
        self._controller = controller

    def routes(self) -> list[GuardedRoute]:
        return [
            GuardedRoute("GET", "/rollouts", self.counts),
            GuardedRoute("GET", "/rollouts/groups", self.lease, head=False, response_class=Response),
            GuardedRoute("POST", "/rollouts/consume", self.consume),
            GuardedRoute(
                "POST", "/rollouts/{rollout_id}/reward", self.reward, access=Access.USER, large=True
            ),
            GuardedRoute("POST", "/rollouts/{rollout_id}/discard", self.discard, access=Access.USER),
        ]

    async def counts(self) -> RolloutCounts:
        """How many rollouts are kept, by state, and how many came to an end since the start, by reason."""
        states, ends = await self._call("counts")
        return RolloutCounts(states=states, ends=ends)

    async def lease(
        self,
        request: Request,
        n: Annotated[int, Query(ge=1, le=MAX_GROUPS, description="at most so many groups")] = 1,
        max_staleness: Annotated[
            int | None, Query(ge=0, description="versions since the oldest token; none: any")
        ] = None,
    ) -> Response:
        """Lease closed groups, the oldest first, with their tokens, log-probabilities and rewards.

        A lease that is not consumed in time expires, and its groups are leased again. `lease` is null if no
        group is ready.
        """
        request.app.state.guard.refuse_other_pages(request)
        content: bytes = await self._call("lease", n, max_staleness)
        return Response(content, media_type="application/json")

    async def consume(self, body: ConsumeBody) -> ConsumedRollouts:
        """Say that a step has learned from a lease. The same call again is harmless."""
        rollouts = await self._call("consume", body.lease, body.step)
        return ConsumedRollouts(step=body.step, rollouts=rollouts)

    async def reward(self, rollout_id: RolloutId, body: RewardBody, request: Request) -> Status:
        """Reward a rollout, which then takes no more turns."""
        owner = request.app.state.guard.owner(request)
        reward: Reward
        if isinstance(body.reward, list):
            reward = tuple(tuple(each) if isinstance(each, list) else each for each in body.reward)
        else:
            reward = body.reward
        await self._call("reward", rollout_id, owner, reward, body.key)
        return Status(status="rewarded")

    async def discard(self, rollout_id: RolloutId, request: Request) -> Status:
        """Discard a rollout: nobody learns from it. May be repeated."""
        await self._call("discard", rollout_id, request.app.state.guard.owner(request))
        return Status(status="discarded")

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await bounded(self._controller.rollouts.remote(name, *arguments), "rollouts", LIMIT_S)
