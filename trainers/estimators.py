"""For `slipstream rl`, without the trainer's settings, which take 0.2 s to import."""

from enum import StrEnum


class AdvantageEstimator(StrEnum):
    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"
    REINFORCE_PP = "reinforce_pp"
    REINFORCE_PP_BASELINE = "reinforce_pp_baseline"


DISTILLING = ("forward_kl", "reverse_kl", "jsd")  # losses to a teacher's log-probabilities
