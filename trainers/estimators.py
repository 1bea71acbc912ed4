"""The advantages' names. `slipstream rl` lists them, and loads neither pydantic (0.3 s) nor torch for it."""

from enum import StrEnum


class AdvantageEstimator(StrEnum):
    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"
    REINFORCE_PP = "reinforce_pp"
    REINFORCE_PP_BASELINE = "reinforce_pp_baseline"
