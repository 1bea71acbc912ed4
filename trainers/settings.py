"""Settings of training, shared with the configuration. Imports no torch."""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from trainers.estimators import DISTILLING


class Aggregation(StrEnum):
    """The weight of a token in the loss of a batch.

    TOKEN: one over tokens (DAPO, https://arxiv.org/abs/2503.14476, section 3.3). SEQUENCE: all completions
    weigh the same (GRPO, https://arxiv.org/abs/2402.03300). CONSTANT: one over completions times `max_tokens`
    (Dr. GRPO, https://arxiv.org/abs/2503.20783).
    """

    TOKEN = "token"
    SEQUENCE = "sequence"
    CONSTANT = "constant"


class KlEstimator(StrEnum):
    """K3: as in GRPO; its gradient is that of KL(reference || current). K3_UNBIASED: times current / old,
    with the gradient of KL(current || reference), https://arxiv.org/abs/2512.02556."""

    K3 = "k3"
    K3_UNBIASED = "k3_unbiased"


# Defaults from each loss's paper.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ppo_clip": {},
    "grpo": {"aggregation": Aggregation.SEQUENCE},
    "dr_grpo": {"aggregation": Aggregation.CONSTANT},
    "dapo": {"clip_high": 0.28},
    "gspo": {
        "aggregation": Aggregation.SEQUENCE,
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    "cispo": {"clip_high": 4.0},
    "rloo": {"aggregation": Aggregation.CONSTANT, "max_tokens": 1},
    "reinforce_pp": {"aggregation": Aggregation.SEQUENCE},
    "sft": {"importance_cap": None},
    "forward_kl": {"importance_cap": None, "beta": 0.0},
    "reverse_kl": {"importance_cap": None, "beta": 1.0},
    "jsd": {"importance_cap": None},
}
# Refused, because the loss does not read them.
UNREAD: Mapping[str, frozenset[str]] = {
    "cispo": frozenset({"clip_low"}),
    "rloo": frozenset({"clip_low", "clip_high"}),
    **dict.fromkeys(("sft", *DISTILLING), frozenset({"clip_low", "clip_high", "importance_cap"})),
}
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class LossConfig(_Settings):
    """The loss: which one, clipping, importance weights, the KL penalty."""

    name: str = "ppo_clip"
    """One of ppo_clip, grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_pp, sft, forward_kl, reverse_kl and
    jsd, which have defaults of their own, or the import path of your own: `package.module:function`."""
    clip_low: PositiveFloat = 0.2
    """The ratio current / old is clipped below 1 minus this."""
    clip_high: PositiveFloat = 0.2
    """The ratio current / old is clipped above 1 plus this."""
    importance_cap: PositiveFloat | None = 2.0
    """Truncates importance weights, old / rollout. None: rollout log-probabilities are not used."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Of the KL penalty to the model that training began with. 0: no reference model is loaded."""
    kl_estimator: KlEstimator = KlEstimator.K3
    """`k3` as in GRPO, or `k3_unbiased`: times current / old, whose gradient is that of the divergence."""
    aggregation: Aggregation = Aggregation.TOKEN
    """The weight of a token: `token` (all the same), `sequence` (all answers the same), `constant` (one over
    answers times `max_tokens`)."""
    max_tokens: PositiveInt = 1024
    """Tokens of the longest answer: the divisor of aggregation `constant`."""
    beta: float = Field(default=0.5, ge=0, le=1)
    """Of `jsd`: 0 is KL(teacher || current), 1 is KL(current || teacher), between them is the generalised
    Jensen-Shannon divergence."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Read by a loss of your own."""

    @property
    def has_rollouts(self) -> bool:
        return self.name != "sft"

    @property
    def has_teacher(self) -> bool:
        return self.name in DISTILLING

    @model_validator(mode="before")
    @classmethod
    def _with_loss_defaults(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not isinstance(data.get("name", "ppo_clip"), str):
            return data
        return {**DEFAULTS.get(data.get("name", "ppo_clip"), {}), **data}

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        if self.name not in DEFAULTS and not _IMPORT_PATH.fullmatch(self.name):
            raise ValueError(
                f"'name': expected one of {', '.join(DEFAULTS)}, or package.module:function, "
                f"got {self.name!r}"
            )
        unread = UNREAD.get(self.name, frozenset())
        if self.name in DEFAULTS and self.name != "jsd":
            unread |= {"beta"}
        for setting in sorted(unread):
            own = DEFAULTS[self.name].get(setting, type(self).model_fields[setting].default)
            if getattr(self, setting) != own:
                raise ValueError(
                    f"'{setting}': expected none with the loss {self.name!r}, which does not read it, "
                    f"got {getattr(self, setting)!r}"
                )
        if self.options and self.name in DEFAULTS:
            raise ValueError(f"'options': only a loss of your own reads them, got name {self.name!r}")
        return self


def wrong_fields(error: ValidationError) -> str:
    """What is wrong, by field, in a line."""
    return "; ".join(
        f"{'.'.join(map(str, each['loc']))}: {each['msg'].removeprefix('Value error, ')}"
        for each in error.errors()
    )


class Strategy(StrEnum):
    SINGLE = "single"  # one process
    FSDP2 = "fsdp2"  # parameters sharded over the ranks, layer by layer


class Schedule(StrEnum):
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


Dtype = Literal["float32", "bfloat16"]
Checkpointing = bool | Literal["selective"]
Vision = Literal["frozen", "trained"]


class OptimizerConfig(_Settings):
    """AdamW and its schedule."""

    learning_rate: PositiveFloat = 1e-6
    """At its highest, after the warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's."""
    schedule: Schedule = Schedule.CONSTANT
    """Of the learning rate after the warm-up: `constant`, `linear` or `cosine`."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate rises from zero."""
    total_steps: PositiveInt | None = None
    """Where `linear` and `cosine`, which require it, reach zero."""

    @model_validator(mode="after")
    def _schedule_ends_after_the_warmup(self) -> Self:
        if self.schedule is Schedule.CONSTANT:
            return self
        if self.total_steps is None:
            raise ValueError(
                f"'total_steps': expected a number with schedule {self.schedule.value!r}, got none "
                "(the schedule ends there)"
            )
        if self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"'total_steps': expected more than 'warmup_steps', {self.warmup_steps}, "
                f"got {self.total_steps} (the total includes the warm-up)"
            )
        return self


class LearnerConfig(_Settings):
    """What a step does."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    loss: LossConfig = LossConfig()
    """The loss."""
    max_grad_norm: PositiveFloat = 1.0
    """A longer gradient is shortened to it."""
    max_tokens_per_microbatch: PositiveInt = 8192
    """Tokens that go through the model at once, padding included; bounds activation memory."""
    updates_per_step: PositiveInt = 1
    """Optimizer steps on one batch. Clipping has no effect on the first."""


class StepSettings(_Settings):
    """Settings of one step; None: the deployment's."""

    learning_rate: PositiveFloat | None = None  # before the schedule's factor
    loss: LossConfig | None = None
    updates_per_step: PositiveInt | None = None
    max_grad_norm: PositiveFloat | None = None

    @classmethod
    def read(cls, given: str | Mapping[str, Any] | None) -> Self:
        """Read an object or its JSON. Raises ValueError, which names each wrong field."""
        try:
            if isinstance(given, str):
                return cls.model_validate_json(given)
            return cls.model_validate({} if given is None else given)
        except ValidationError as error:
            raise ValueError(wrong_fields(error)) from error

    def applied(self, config: LearnerConfig) -> LearnerConfig:
        given = {name: value for name, value in self if value is not None and name != "learning_rate"}
        if self.learning_rate is not None:
            given["optimizer"] = config.optimizer.model_copy(update={"learning_rate": self.learning_rate})
        return config.model_copy(update=given)


class LoraConfig(_Settings):
    """An adapter that is trained in place of the model's own weights."""

    publish: Literal["adapter", "merged"] = "adapter"
    """`adapter`: published alone, and requests name it as their `model`. `merged`: added to the model's
    weights, whose sum is the fleet's next version."""
    name: str = ""
    """The adapter's name in the fleet; with `merged` there is none."""
    rank: PositiveInt = 16
    """Of the two matrices that are trained for each weight."""
    alpha: PositiveFloat = 32.0
    """The adapter is scaled by alpha / rank."""
    target_modules: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Linear layers, such as q_proj. None: all but the output."""

    @model_validator(mode="after")
    def _name_of_an_adapter(self) -> Self:
        if self.publish == "adapter" and not self.name:
            raise ValueError("'name': expected one for the adapter in the fleet, got none")
        if self.publish == "merged" and self.name:
            raise ValueError(
                f"'name': expected none with publish 'merged', got {self.name!r} (what is published is a "
                "version of the model, under the model's name)"
            )
        return self


class DrafterConfig(_Settings):
    """A drafter of speculative decoding that is trained beside the policy, and published with it."""

    model: str | None = Field(default=None, min_length=1)
    """The directory of an EAGLE-3 head, the one that the engines draft with. `slipstream drafter new` writes
    one. None: the multi-token prediction in the model's checkpoint."""
    learning_rate: PositiveFloat = 1e-4
    """AdamW's, the same in all steps."""


class TrainerConfig(LearnerConfig):
    """The trainer: what a step does, and its processes."""

    lora: LoraConfig | None = None
    """Train an adapter. None: all weights are trained."""
    drafter: DrafterConfig | None = None
    """Train a drafter as well. None: none is trained."""
    vision: Vision | None = None
    """Learn from images, with strategy `single`: the whole vision-language model is loaded, and what sees is
    `frozen` or `trained`. None: images are refused, and what sees stays as it is."""
    strategy: Strategy = Strategy.SINGLE
    """`single`: one process. `fsdp2`: parameters are sharded over the ranks, layer by layer."""
    world_size: PositiveInt = 1
    """Ranks."""
    dtype: Dtype = "float32"
    """Of parameters, gradients and moments; with `lora` of the base."""
    compute_dtype: Literal["bfloat16"] | None = None
    """Of matrix products. None: `dtype`. bfloat16 over float32 parameters is mixed precision."""
    activation_checkpointing: Checkpointing = False
    """`true`: keep only the inputs of decoder layers. `selective`: keep what is expensive to recompute."""
    compile_layers: bool = False
    """torch.compile of each decoder layer, in the first steps."""
    packed: bool = False
    """No padding, one copy of each prompt (torch's FlexAttention). Needs device `cuda` and a model whose
    layers all attend to all earlier tokens."""
    wire_dtype: Dtype | None = None
    """Published and stored weights are cast to it. None: they keep their dtypes."""
    checkpoint_every: NonNegativeInt = 10
    """A checkpoint for a restart is written after every n-th published step; 0: never. It takes 8 bytes a
    parameter in float32, and 12 where `wire_dtype` rounds the weights."""
    gpus_per_rank: float = Field(default=1.0, gt=0, le=1)
    """What Ray reserves for a rank with device `cuda`."""

    @property
    def published_adapter(self) -> LoraConfig | None:
        """The adapter that is published alone; None: versions of all weights are."""
        return None if self.lora is None or self.lora.publish == "merged" else self.lora

    @model_validator(mode="after")
    def _drafter_of_a_version(self) -> Self:
        if self.drafter is not None and self.published_adapter is not None:
            raise ValueError(
                "'drafter': expected none with a 'lora' that is published as an adapter, got one (it is "
                "published with a version of the model)"
            )
        return self

    @model_validator(mode="after")
    def _images_in_one_process(self) -> Self:
        if self.vision is None:
            return self
        if self.strategy is not Strategy.SINGLE or self.drafter is not None:
            raise ValueError("'vision': expected strategy 'single' and no 'drafter' with it")
        if self.vision == "trained" and self.lora is not None:
            raise ValueError("'vision': expected 'frozen' with a 'lora', whose base is frozen, got 'trained'")
        return self

    @model_validator(mode="after")
    def _selective_by_the_compiler(self) -> Self:
        if self.packed and self.activation_checkpointing == "selective" and not self.compile_layers:
            raise ValueError(
                "'activation_checkpointing': expected true or false with 'packed' but not 'compile_layers', "
                "got 'selective' (FlexAttention is compiled, and torch does not look into compiled code)"
            )
        return self

    @model_validator(mode="after")
    def _one_process_is_one_rank(self) -> Self:
        if self.strategy is Strategy.SINGLE and self.world_size != 1:
            raise ValueError(
                f"'world_size': expected 1 with strategy 'single', got {self.world_size} "
                "(more than one rank needs strategy 'fsdp2')"
            )
        return self
