"""JSON bodies of our routes. Attribute docstrings appear in `/openapi.json`.

Unknown fields are refused, except on vLLM's RL routes, where vLLM 0.32 ignores them.
"""

from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    JsonValue,
    ModelWrapValidatorHandler,
    PositiveInt,
    SkipValidation,
    Strict,
    WithJsonSchema,
    model_validator,
)

from deployments.protocol.engine_state import InFlight, SleepTag
from trainers.settings import StepSettings
from trainers.trajectory import Trajectory

MAX_SAMPLE = 4000  # characters of a rollout
RUN = r"[A-Za-z0-9._:-]{1,100}"


class OwnBody(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class VllmBody(BaseModel):
    """A body of vLLM's RL routes."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, use_attribute_docstrings=True)


# -- the fleet -------------------------------------------------------------------------------------


class PublishDirectoryBody(OwnBody):
    path: str = Field(min_length=1)
    """Absolute, on every replica's host, or a URL; below one of `security.checkpoint_roots`."""
    label: str | None = None
    """A name beside the version's number."""


class RollbackBody(OwnBody):
    version: int
    """In the store."""


class ScaleBody(OwnBody):
    replicas: PositiveInt | Literal["auto"]
    """`auto`: as many as the load needs."""


# -- rollouts ---------------------------------------------------------------------------------------


class RewardBody(OwnBody):
    reward: FiniteFloat | list[FiniteFloat | list[FiniteFloat]]
    """A number; or a list with one for each turn, or with a list of one for each of its sampled tokens."""


class SettledRollout(OwnBody):
    id: str
    """`x-rollout-id`."""
    reward: FiniteFloat | list[FiniteFloat | list[FiniteFloat]]
    info: str = Field(default="", max_length=1 << 20)
    """The trainer gets it with the rollout."""


class BeginBody(OwnBody):
    run: str = Field(pattern=f"^{RUN}$")
    """The job's name."""
    number: int = Field(ge=0)
    """The first group's; all before it have begun."""
    count: int = Field(default=1, ge=1, le=4096)
    """How many groups."""


class SettledGroup(OwnBody):
    group: str
    """RUN.NUMBER."""
    rollouts: list[SettledRollout]
    """Those that are learned from. The group's others are discarded."""
    reason: str = Field(default="discarded", min_length=1, max_length=128)
    """Why the group is left out, if there are none."""


class SettleBody(OwnBody):
    groups: list[SettledGroup]
    """All of them, or none."""


class TakeBody(OwnBody):
    step: str = Field(min_length=1, max_length=128)
    """The trainer's name for the step that learns. The same call again gets the same groups."""
    groups: int = Field(default=1, ge=1, le=4096)
    """So many, or none."""
    run: str = Field(default="", pattern=f"^({RUN})?$")
    """Of which job; empty: groups that no job has begun."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Versions since the oldest token; groups above it are discarded. Null: any."""
    offset: int = Field(default=0, ge=0)
    """Of the first group in the answer. One answer has at most some million tokens, and says how many
    groups are left."""


# -- the trainer -----------------------------------------------------------------------------------


class StepBody(OwnBody):
    trajectories: list[SkipValidation[Trajectory]]
    """The trainer checks them, and names the first bad ones by number."""
    settings: SkipValidation[StepSettings] | None = None
    """In place of the trainer's, for this step alone."""

    @model_validator(mode="wrap")
    @classmethod
    def _arrays(cls, body: object, parse: ModelWrapValidatorHandler["StepBody"]) -> "StepBody":
        """A body that is not JSON stays bytes: the trainer reads both."""
        if isinstance(body, bytes):
            return cls.model_construct(trajectories=body)  # type: ignore[arg-type]
        return parse(body)


class PublishBody(OwnBody):
    label: str | None = None
    """A name beside the version's number."""
    step: int | None = None
    """Publish only if the trainer has done so many optimizer steps."""
    after: int | None = None
    """Replace this version, which is not the trainer's; publish only if it is committed."""


class RolloutBody(OwnBody):
    text: str = Field(max_length=MAX_SAMPLE)
    reward: FiniteFloat
    versions: list[Annotated[tuple[int, int], Strict(False)]] = []  # (version, tokens)


class ReportBody(OwnBody):
    """A step of a job, for the page: its own figures, and some of its rollouts."""

    run: str = Field(min_length=1, max_length=200)
    """The job's name."""
    step: int
    """The step's number."""
    values: dict[str, FiniteFloat | bool | None] = Field(max_length=200)
    """Figures by name."""
    rollouts: list[RolloutBody] = Field(default=[], max_length=16)
    """Each has `text`, `reward` and `versions`: pairs of a version and its number of tokens."""


class SaveBody(OwnBody):
    path: str | None = None
    """On the trainer's host; by default a new directory in the store."""


# -- vLLM's RL routes ------------------------------------------------------------------------------


class InitEngineBody(VllmBody):
    init_info: dict[str, JsonValue]
    """What vLLM's trainer engine of the transport sends."""


class UpdateWeightsBody(VllmBody):
    """One payload of the open round, or (prime-rl) a directory that becomes the next version."""

    update_info: Annotated[
        JsonValue,  # checked by `ipc_handles.refuse_or_restrict`
        WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}]}),
    ] = None
    """What vLLM's trainer engine of the transport sends; a list: one for each worker."""
    weight_dir: str | None = None
    """A directory, as `path` of `/fleet/publish`."""

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Self:
        given = sorted(self.model_fields_set)
        if len(given) != 1:
            raise ValueError(f"expected the field 'update_info' or the field 'weight_dir', got {given}")
        if given == ["weight_dir"] and self.weight_dir is None:
            raise ValueError("weight_dir: expected the path of a directory, got None")
        return self


class FinishUpdateBody(VllmBody):
    weight_version: str | None = None
    """A label beside the version's number."""


class AbortUpdateBody(OwnBody):
    round_id: int
    """As `/fleet` names it after `/start_weight_update`."""


class WeightVersionBody(VllmBody):
    new_version: str
    """The label."""


class LoadAdapterBody(VllmBody):
    lora_name: str
    """The adapter's name, without a version."""
    lora_path: str
    """Absolute, below one of `security.checkpoint_roots`."""
    load_inplace: bool = False
    """The name may be live, and gets another version."""
    is_3d_lora_weight: bool = False
    """vLLM's, for adapters of experts."""


class UnloadAdapterBody(VllmBody):
    lora_name: str
    """All its versions; or `name@7`."""


class AbortRequestsBody(VllmBody):
    request_ids: list[str] | None = None
    """None or empty: all requests."""


class WeightCheckerBody(VllmBody):
    action: Literal["checksum", "compare"]
    """`compare`: with `baseline`."""
    baseline: dict[str, str] | None = None
    """The checksum of each tensor, by name."""

    @model_validator(mode="after")
    def _comparison_has_a_baseline(self) -> Self:
        if self.action == "compare" and self.baseline is None:
            raise ValueError("baseline: expected an object of checksums with action 'compare', got none")
        return self


class SleepBody(VllmBody):
    """vLLM 0.32 reads the query alone; SkyRL sends a body. The query takes precedence."""

    level: int | None = Field(default=None, ge=0, le=2)
    """1 where none is given."""
    mode: Annotated[InFlight, Strict(False)] | None = None
    """What happens to running requests."""


class WakeUpBody(VllmBody):
    """As `SleepBody`."""

    tags: list[Annotated[SleepTag, Strict(False)]] | None = None
    """The parts to wake; none of them: all."""


class ResetPrefixCacheBody(VllmBody):
    """As `SleepBody`; a flag that is set in either counts."""

    reset_running_requests: bool = False
    """Running requests lose their cache, and compute it again."""
    reset_external: bool = False
    """Also what a KV connector holds."""
