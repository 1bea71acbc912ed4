"""Agents and their environments reward or discard captured rollouts; trainers take them."""

from typing import Annotated, Any

from fastapi import Path, Request, Response

from app.http.auth import Access, Guard
from app.http.requests import BeginBody, RewardBody, SettleBody, TakeBody
from app.http.route import Controller, Routes, of_app
from deployments.calls.rpc import CallHandle, retried
from deployments.protocol.responses import RolloutCounts, RunPosition, Status
from deployments.protocol.rollouts import Reward

LIMIT_S = 90.0  # more than the controller waits for its disk
RolloutId = Annotated[str, Path(description="the `x-rollout-id` of its requests")]


OfGuard = Annotated[Guard, of_app("guard")]
routes = Routes()


@routes("GET", "/rollouts")
async def counts(controller: Controller) -> RolloutCounts:
    """How many rollouts are kept, by state, and how many groups came to an end, by reason."""
    states, ends = await _call(controller, "counts")
    return RolloutCounts(states=states, ends=ends)


@routes("GET", "/rollouts/runs/{run}")
async def position(
    controller: Controller, run: Annotated[str, Path(description="its name, as in `/rollouts/begin`")]
) -> RunPosition:
    """Which groups a job has begun, and what became of them; nothing of one that is unknown."""
    known, opened, ready = await _call(controller, "position", run)
    return RunPosition(next=known.next, open=opened, ready=ready, ends=known.ends)


@routes("POST", "/rollouts/begin", repeatable=True)
async def begin(controller: Controller, body: BeginBody) -> Status:
    """Open `count` groups of a job from RUN.NUMBER on, for requests with their names in `x-rollout-group`."""
    await _call(controller, "begin", body.run, body.number, body.count)
    return Status(status="begun")


@routes("POST", "/rollouts/settle", large=True, repeatable=True)
async def settle(controller: Controller, body: SettleBody) -> Status:
    """Reward members of groups, discard the others, and close all groups or none. May be repeated."""
    groups = [
        (each.group, {one.id: (_reward(one.reward), one.info) for one in each.rollouts}, each.reason)
        for each in body.groups
    ]
    await _call(controller, "settle", groups)
    return Status(status="settled")


@routes("POST", "/rollouts/take", repeatable=True, response_class=Response)
async def take(controller: Controller, body: TakeBody) -> Response:
    """A step consumes closed groups, the oldest first: their tokens, log-probabilities and rewards.

    The same call again gets the same groups. `step` is null while there are fewer than it asks for.
    """
    content: bytes = await _call(
        controller, "take", body.step, body.run, body.groups, body.max_staleness, body.offset
    )
    return Response(content, media_type="application/json")


@routes("GET", "/rollouts/images/{digest}", response_class=Response)
async def image(
    controller: Controller, digest: Annotated[str, Path(description="SHA-256, as in `images` of a sequence")]
) -> Response:
    """The file of an image that a rollout's prompts have."""
    return Response(await _call(controller, "image", digest), media_type="application/octet-stream")


@routes("POST", "/rollouts/{rollout_id}/reward", access=Access.USER, large=True)
async def reward(
    controller: Controller, rollout_id: RolloutId, body: RewardBody, request: Request, guard: OfGuard
) -> Status:
    """Reward a rollout, which then takes no more turns."""
    owner = guard.owner(request)
    await _call(controller, "reward", rollout_id, owner, _reward(body.reward))
    return Status(status="rewarded")


@routes("POST", "/rollouts/{rollout_id}/discard", access=Access.USER)
async def discard(controller: Controller, rollout_id: RolloutId, request: Request, guard: OfGuard) -> Status:
    """Discard a rollout: no trainer learns from it. May be repeated."""
    await _call(controller, "discard", rollout_id, guard.owner(request))
    return Status(status="discarded")


async def _call(controller: CallHandle, name: str, *arguments: Any) -> Any:
    return await retried(controller, "rollouts", name, *arguments, limit_s=LIMIT_S)


def _reward(given: float | list[float | list[float]]) -> Reward:
    if not isinstance(given, list):
        return given
    return tuple(tuple(each) if isinstance(each, list) else each for each in given)
