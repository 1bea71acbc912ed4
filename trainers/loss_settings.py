"""The settings of losses, free of torch."""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)


class Aggregation(StrEnum):
    """The weight of one token in the loss of a batch.

    TOKEN: all tokens of the batch have the same weight (DAPO: Yu et al. 2025,
    https://arxiv.org/abs/2503.14476, section 3.3). SEQUENCE: all answers have the same weight, whatever
    their length (GRPO: https://arxiv.org/abs/2402.03300). CONSTANT: the sum is divided by the number of
    answers times `max_tokens`, so length has no effect (Dr. GRPO: https://arxiv.org/abs/2503.20783).
    """

    TOKEN = "token"
    SEQUENCE = "sequence"
    CONSTANT = "constant"


class ImportanceLevel(StrEnum):
    """What has an importance weight, old / rollout.

    TOKEN: each token its own. ANSWER: all tokens of an answer the geometric mean of theirs, as GSPO's ratio.
    """

    TOKEN = "token"
    ANSWER = "answer"


class KlEstimator(StrEnum):
    """How the KL penalty is estimated for each token; Schulman's k3, see `trainers.losses.policy_loss`.

    K3: as GRPO has it; its gradient is that of another divergence, KL(reference || current). K3_UNBIASED:
    times current / old, so that its gradient is that of KL(current || reference): DeepSeek-AI 2025,
    "DeepSeek-V3.2", https://arxiv.org/abs/2512.02556.
    """

    K3 = "k3"
    K3_UNBIASED = "k3_unbiased"


# What each loss of `trainers.losses` has instead of the defaults of `LossConfig`: its paper's.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ppo_clip": {},
    "grpo": {"aggregation": Aggregation.SEQUENCE},
    "dr_grpo": {"aggregation": Aggregation.CONSTANT},
    "dapo": {"clip_high": 0.28},
    "gspo": {
        "aggregation": Aggregation.SEQUENCE,
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "importance_level": ImportanceLevel.ANSWER,
    },
    "cispo": {"clip_high": 4.0},
    "rloo": {"aggregation": Aggregation.CONSTANT, "max_tokens": 1},
    "reinforce_pp": {"aggregation": Aggregation.SEQUENCE},
    "sft": {"importance_cap": None},
}
# Settings that a loss does not read. To set one is refused, for it would do nothing, or harm.
UNREAD: Mapping[str, frozenset[str]] = {
    "cispo": frozenset({"clip_low"}),
    "rloo": frozenset({"clip_low", "clip_high"}),
    "sft": frozenset({"clip_low", "clip_high", "importance_cap", "importance_level"}),
}
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class LossConfig(BaseModel):
    """The loss: which one, clipping, importance weights, the KL penalty.

    Raises:
        ValidationError: a value out of range, no such loss, or a setting that the loss does not read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "ppo_clip"  # one of `DEFAULTS`, or the import path of your own: package.module:function
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    # Truncated importance sampling on rollout log-probabilities. None: they are not used.
    importance_cap: PositiveFloat | None = 2.0
    importance_level: ImportanceLevel = ImportanceLevel.TOKEN
    kl_coefficient: NonNegativeFloat = 0.0  # 0: no reference model is loaded
    kl_estimator: KlEstimator = KlEstimator.K3
    aggregation: Aggregation = Aggregation.TOKEN
    max_tokens: PositiveInt = 1024  # of one answer; the divisor of Aggregation.CONSTANT
    options: dict[str, JsonValue] = Field(default_factory=dict)  # for a loss of your own

    @property
    def has_rollouts(self) -> bool:
        """Whether the tokens were sampled from a policy, so that their log-probabilities mean something."""
        return self.name != "sft"

    @model_validator(mode="before")
    @classmethod
    def _with_defaults_of_the_loss(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not isinstance(data.get("name", "ppo_clip"), str):
            return data
        return {**DEFAULTS.get(data.get("name", "ppo_clip"), {}), **data}

    @model_validator(mode="after")
    def _is_a_loss_that_reads_its_settings(self) -> Self:
        if self.name not in DEFAULTS and not _IMPORT_PATH.fullmatch(self.name):
            raise ValueError(
                f"'name': expected one of {', '.join(DEFAULTS)}, or package.module:function, "
                f"got {self.name!r}"
            )
        for setting in sorted(UNREAD.get(self.name, ())):
            own = DEFAULTS[self.name].get(setting, type(self).model_fields[setting].default)
            if getattr(self, setting) != own:
                raise ValueError(
                    f"'{setting}': expected none with the loss {self.name!r}, which does not read it, "
                    f"got {getattr(self, setting)!r}"
                )
        if self.options and self.name in DEFAULTS:
            raise ValueError(f"'options': only a loss of your own reads them, got name {self.name!r}")
        return self
