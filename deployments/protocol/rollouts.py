"""What routers, replicas and the controller tell each other about captured rollouts."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from deployments.protocol.errors import InvalidRequest
from deployments.protocol.routing import number_of
from trainers.trajectory import RoutedExperts

ID_HEADER = "x-rollout-id"
REQUEST_HEADER = "x-rollout-turn"
GROUP_HEADER, SIZE_HEADER = "x-rollout-group", "x-rollout-group-size"
CONTINUE_HEADER = "x-rollout-continue"  # "false": a stream whose replica is lost ends with an error
NAMES = (ID_HEADER, REQUEST_HEADER, GROUP_HEADER, SIZE_HEADER, CONTINUE_HEADER)
TURN_HEADER = b"x-slipstream-turn"  # router to replica: a `RolloutRequest`
# From router to replica: the client's body has so many bytes, followed by what was said already. In a
# response: each chunk is a frame: events, END, lines that say what they are made of, END.
SAID_HEADER = b"x-slipstream-said"
END = b"\0"  # JSON has none
NOT_CONTINUED = b"null\n"  # the last line: the answer cannot be continued
MOVED = b'"moved"\n'  # the last line: the replica is being stopped, in order
CAPTURED = (  # paths
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    "/inference/v1/generate",
)
NOT_CAPTURED = ("/v1/chat/completions/batch", "/v1/systemone", "/v1/decisions", "/cohere/v2/chat")
GENERATING = (*CAPTURED, *NOT_CAPTURED)  # elsewhere, as on /tokenize, the headers mean nothing
# In place of `GROUP_HEADER`, `SIZE_HEADER` and `ID_HEADER`. Clients ask for vLLM's routes beside /v1, too.
ROLLOUT_URL = re.compile(r"(?:/g/([^/]+)(?:/(\d+))?)?/t/([^/]+)(/.+)")
MAX_SIZE = 1 << 16
_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._:-]{1,128}")  # clients resolve `.` and `..` in paths

# One number; or for each turn one, or one for each of its sampled tokens.
Reward = float | tuple[float | tuple[float, ...], ...]


class RolloutLimits(BaseModel):
    """Capture of requests with `x-rollout-id`. Log-probabilities are then those of the distribution that was
    sampled from (vLLM's `logprobs_mode: processed_logprobs`), for every request."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    max_rollouts: PositiveInt = 20_000
    """Rollouts that are kept. Above that those that have ended are forgotten, the oldest first; then what has
    waited for its job for longer than `keep_s`; if there is none, new ones get 503."""
    max_gib: PositiveFloat = 16.0
    """The size of `captured.sqlite` in `state_dir`; above that new rollouts and turns get 503."""
    keep_s: PositiveFloat = 3600.0
    """How long an incomplete group waits, which then closes with the members that have a reward; how long a
    closed one waits for a trainer; and how long a step can get again what it has consumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """What a replica needs to record a request's answers.

    Attributes:
        rollout_ids: one, or one for each choice.
        owner: "": the operator, or anyone where users need no token.
        request: the request's own name.
        attempt: grows each time that it is sent.
        group_size: 0: only the deadline closes the group.
    """

    rollout_ids: tuple[str, ...]
    owner: str
    request: str
    attempt: int = 0
    group: str | None = None
    group_size: int = 0

    def header(self, attempt: int) -> str:
        given = (self.owner, self.request, str(attempt), self.group or "", str(self.group_size))
        return ",".join((*given, *self.rollout_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedImage:
    """An image of a prompt."""

    offset: int  # position of its first token
    digest: str  # SHA-256 of the file, in hexadecimal
    content: bytes


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
        images: in the order of their tokens.
        routed_experts: None: the engine does not return them (`enable_return_routed_experts`).
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
    images: tuple[CapturedImage, ...] = ()
    routed_experts: RoutedExperts | None = None


def framed(said: bytes, events: bytes) -> bytes:
    return events + END + said + END


def check_id(name: str, value: str) -> str:
    """Raises InvalidRequest: it could not be a part of a path."""
    if _ID.fullmatch(value) is None:
        raise InvalidRequest(
            f"{name}: expected 1 to 128 letters, digits or any of '._:-', got {value[:140]!r}"
        )
    return value


def turn_of(value: bytes | None) -> RolloutRequest | None:
    """None: the request is not captured."""
    if value is None:
        return None
    owner, request, attempt, group, size, *rollout_ids = value.decode().split(",")
    return RolloutRequest(
        rollout_ids=tuple(rollout_ids),
        owner=owner,
        request=request,
        attempt=int(attempt),
        group=group or None,
        group_size=int(size),
    )


def rollout_of(headers: Mapping[str, str], owner: str, path: str) -> RolloutRequest:
    """Raises InvalidRequest."""
    if path not in CAPTURED:
        raise InvalidRequest(f"{ID_HEADER}: expected a request to one of {', '.join(CAPTURED)}, got {path}")
    group = headers.get(GROUP_HEADER)
    if (continues := headers.get(CONTINUE_HEADER, "true")) not in ("true", "false"):
        raise InvalidRequest(f"{CONTINUE_HEADER} must be true or false, got {continues[:40]!r}")
    names = [name.strip() for name in headers[ID_HEADER].split(",")]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"{ID_HEADER}: expected another id for each choice, got {headers[ID_HEADER]!r}")
    return RolloutRequest(
        rollout_ids=tuple(check_id(ID_HEADER, name) for name in names),
        owner=owner,
        request=check_id(REQUEST_HEADER, headers.get(REQUEST_HEADER, secrets.token_hex(16))),
        group=None if group is None else check_id(GROUP_HEADER, group),
        group_size=int(number_of(headers, SIZE_HEADER, 0, most=MAX_SIZE, whole=True)),
    )
