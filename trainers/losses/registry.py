"""Every loss by its name, and a user's own by its import path."""

import importlib
from collections.abc import Mapping

import torch

from trainers.loss_settings import DEFAULTS, LossConfig
from trainers.losses.cispo import cispo
from trainers.losses.dapo import dapo
from trainers.losses.dr_grpo import dr_grpo
from trainers.losses.grpo import grpo
from trainers.losses.gspo import gspo
from trainers.losses.interface import LearnedTokens, Loss, TokenLosses
from trainers.losses.ppo_clip import ppo_clip
from trainers.losses.reinforce_pp import reinforce_pp
from trainers.losses.rloo import rloo
from trainers.losses.sft import sft

LOSSES: Mapping[str, Loss] = {
    "ppo_clip": ppo_clip,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "sft": sft,
}
assert LOSSES.keys() == DEFAULTS.keys()


def load_loss(config: LossConfig) -> Loss:
    """The loss of this name. One of a user's own is tried on three tokens, so that no step fails later.

    Raises:
        ValueError: it cannot be imported, or does not do what `Loss` says.
    """
    if config.name in LOSSES:
        return LOSSES[config.name]
    module, _, name = config.name.partition(":")
    try:
        loss: Loss = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the loss {config.name!r} cannot be imported: {error}") from error
    _try(loss, config)
    return loss


def _try(loss: Loss, config: LossConfig) -> None:
    tokens = _example()
    try:
        made = loss(tokens, config)
    except Exception as error:  # it is the user's code, which may raise anything
        raise ValueError(f"the loss {config.name!r} fails on three tokens: {error!r}") from error
    if not isinstance(made, TokenLosses) or made.values.shape != (3,) or not made.values.requires_grad:
        shown = made if not isinstance(made, TokenLosses) else made.values
        raise ValueError(
            f"the loss {config.name!r} must return TokenLosses with one value and its gradient for each of "
            f"3 tokens, got {shown!r}"
        )


def _example() -> LearnedTokens:
    """Three tokens of two answers."""
    logprobs = torch.tensor([-1.0, -0.5, -2.0])
    return LearnedTokens(
        logprobs=logprobs.clone().requires_grad_(),
        old_logprobs=logprobs,
        rollout_logprobs=logprobs,
        advantages=torch.tensor([1.0, 1.0, -1.0]),
        answers=torch.tensor([0, 0, 1]),
        lengths=torch.tensor([2, 1]),
        versions=torch.tensor([0, 0, 0]),
        reference_logprobs=logprobs,
    )
