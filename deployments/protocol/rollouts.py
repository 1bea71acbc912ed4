"""What routers, replicas and the controller tell each other about captured rollouts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from deployments.protocol.errors import InvalidRequest

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

# One number; or for each turn one, or one for each of its sampled tokens.
Reward = float | tuple[float | tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """See `RolloutsConfig`, which has the same names."""

    max_rollouts: int
    max_tokens: int
    max_gib: float
    group_timeout_s: float
    lease_s: float
    keep_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """The rollout that a request belongs to, by its headers."""

    rollout_id: str
    owner: str  # "": the operator, or anyone where users need no token
    group: str | None = None
    group_size: int = 0  # 0: only the deadline closes the group
    group_timeout_s: float | None = None  # None: the setting


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedTurn:
    """One answer of an engine.

    Attributes:
        key: of the client's request, with the number of the choice.
        attempt: the router's; the client got the answer of the greatest one.
        prompt_token_ids, token_ids: int32.
        logprobs: float32, one for each of `token_ids`.
        weight_versions: (version, start, end) over `token_ids`.
        adapter: NAME@VERSION; None: the base model.
        constrained: a grammar limited the choice of tokens.
        sampling: the request's sampling parameters.
    """

    key: str
    attempt: int
    prompt_token_ids: bytes
    token_ids: bytes
    logprobs: bytes
    weight_versions: tuple[tuple[int, int, int], ...]
    adapter: str | None
    constrained: bool
    finish_reason: str | None
    sampling: Mapping[str, float | int | None]


def check_id(name: str, value: str) -> str:
    """Raises InvalidRequest: it could not be a part of a path."""
    if _ID.fullmatch(value) is None:
        raise InvalidRequest(
            f"{name}: expected 1 to 128 letters, digits or any of '._:-', got {value[:140]!r}"
        )
    return value
