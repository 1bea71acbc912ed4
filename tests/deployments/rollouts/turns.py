"""Turns as replicas capture them, with tokens that a reader can follow."""

from array import array
from collections.abc import Mapping, Sequence
from hashlib import sha256

from deployments.protocol.rollouts import CapturedImage, CapturedTurn, RolloutLimits, RolloutRequest
from trainers.trajectory import RoutedExperts

LIMITS = RolloutLimits(max_rollouts=6, max_gib=0.01, keep_s=50.0)


def request(rollout_id: str, *, owner: str = "", group: str | None = None, size: int = 0) -> RolloutRequest:
    return RolloutRequest(rollout_ids=(rollout_id,), owner=owner, request="", group=group, group_size=size)


def experts(tokens: Sequence[int], number: int) -> RoutedExperts:
    ids = bytes(each for token in tokens for each in (token, number))
    return RoutedExperts(layers=1, top_k=2, dtype="uint8", ids=ids)


def captured(
    key: str,
    prompt: Sequence[int],
    sampled: Sequence[int],
    *,
    attempt: int = 0,
    version: int = 3,
    adapter: str | None = None,
    images: Mapping[int, bytes] | None = None,
    routed: int | None = None,
) -> CapturedTurn:
    """The log-probability of each token is its negative. `images` are by the place of their first token.
    `routed`: its experts in the only layer, where those of each position are its token and this number."""
    return CapturedTurn(
        key=key,
        attempt=attempt,
        prompt_token_ids=array("i", prompt).tobytes(),
        token_ids=array("i", sampled).tobytes(),
        logprobs=array("f", [-token for token in sampled]).tobytes(),
        weight_versions=((version, 0, len(sampled)),),
        adapter=adapter,
        constrained=False,
        finish_reason="stop",
        sampling={"temperature": 1.0},
        images=tuple(
            CapturedImage(offset=offset, digest=sha256(content).hexdigest(), content=content)
            for offset, content in (images or {}).items()
        ),
        routed_experts=None if routed is None else experts([*prompt, *sampled][:-1], routed),
    )
