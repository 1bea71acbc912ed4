"""Log-probabilities of chosen tokens, without all logits in memory.

Logits are a step's largest tensor: 20 GB in float32 for 32k tokens and a vocabulary of 150k. The output layer
gets the chosen positions' hidden states in parts, and again in the backward pass. Families that scale
(Granite, Cohere, Falcon-H1) or cap (Gemma) logits are probed; their logits are computed at once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from trainers.model_config import vocabulary_size

LOGITS_AT_ONCE = 1 << 27  # 512 MiB in float32
COMPILED_LOGITS_AT_ONCE = 1 << 29  # 1 GiB in bfloat16
_ENTROPY_TOKENS = 512  # positions at a time in eager mode

_Forward = Callable[[torch.Tensor], torch.Tensor]
_Function = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """float32 [M]."""

    logprobs: torch.Tensor
    entropies: torch.Tensor | None  # nats, without gradient
    others: torch.Tensor | None  # log-probabilities of other tokens, [M, K]


class OutputHead:
    """`at_once` bounds the number of logits, but allows one position."""

    def __init__(self, model: PreTrainedModel, *, compiled: bool = False, at_once: int | None = None) -> None:
        self._model = model
        self._math = math_of(compiled)
        self._vocabulary_size = vocabulary_size(model.config)
        self._positions_at_once = positions_at_once(self._vocabulary_size, compiled=compiled, logits=at_once)

    def scores(
        self,
        positions: torch.Tensor,
        targets: torch.Tensor,
        *,
        others: torch.Tensor | None = None,
        with_entropies: bool = False,
        **inputs: Any,
    ) -> TokenScores:
        """Log-probabilities of M tokens, and of K others in their places.

        Args:
            positions: int64 [M], into R * L: where each token is predicted.
            targets: int64 [M].
            others: int64 [M, K].
            inputs: of the model's forward; `input_ids` is [R, L].
        """
        entropies: list[torch.Tensor] = []
        asked = targets[:, None] if others is None else torch.cat([targets[:, None], others], dim=1)

        def chosen(logits: torch.Tensor, targets: torch.Tensor, part: int) -> torch.Tensor:
            if with_entropies and part == len(entropies):  # not in recomputation
                entropies.append(self._math.entropies(logits.detach()))
            return self._math.chosen(logits, targets)

        if self._is_last:
            logprobs = self._in_parts(chosen, positions, asked, **inputs)
        else:
            logprobs = chosen(logits_at(self._model, positions, **inputs), asked, 0)
        return TokenScores(
            logprobs=logprobs[:, 0],
            entropies=torch.cat(entropies) if with_entropies else None,
            others=None if others is None else logprobs[:, 1:],
        )

    def _in_parts(
        self, chosen: _Function, positions: torch.Tensor, targets: torch.Tensor, **inputs: Any
    ) -> torch.Tensor:
        head = self._model.get_output_embeddings()
        forward = head.forward

        def part(hidden: torch.Tensor, targets: torch.Tensor, number: int) -> torch.Tensor:
            return chosen(forward(hidden), targets, number)

        def parts(hidden: torch.Tensor) -> torch.Tensor:
            hidden = hidden.flatten(0, 1)[positions]
            return in_parts(part, hidden, targets, self._positions_at_once)[None]

        with replaced(head, parts):
            logprobs: torch.Tensor = self._model(**inputs, use_cache=False).logits[0]
        return logprobs

    @cached_property
    @torch.no_grad()
    def _is_last(self) -> bool:
        """Whether the model returns the output layer's result. Probed in the first pass, which settles the
        parameters that FSDP2 gives gradients; without autocast, which would cache cast weights. Raises
        ValueError if hidden states depend on later tokens."""
        head = self._model.get_output_embeddings()
        if head is None:
            return False
        device = next(self._model.parameters()).device
        given = torch.linspace(-1e3, 1e3, 2 * self._vocabulary_size, device=device).view(1, 2, -1)
        first: list[torch.Tensor] = []  # hidden states of the first position

        def returned(hidden: torch.Tensor) -> torch.Tensor:
            first.append(hidden.flatten(0, -2)[0].float())
            return given

        of_gpu = [device] if device.type == "cuda" else []
        with (
            torch.random.fork_rng(of_gpu),
            replaced(head, returned),
            torch.autocast(device.type, enabled=False),
        ):
            for following in (0, 1):
                tokens = torch.tensor([[0, following]], device=device)
                logits = self._model(input_ids=tokens, use_cache=False).logits
        difference = (first[0] - first[-1]).norm()
        if difference > 0.02 * first[0].norm():  # more than rounding of other kernels
            raise ValueError(
                f"expected a causal model, got {type(self._model).__name__}: without an image or a type for "
                "each token, its tokens see those after them, and it cannot be trained on text alone"
            )
        return torch.equal(logits, given)


def positions_at_once(vocabulary_size: int, *, compiled: bool, logits: int | None = None) -> int:
    if logits is None:
        logits = COMPILED_LOGITS_AT_ONCE if compiled else LOGITS_AT_ONCE
    return max(1, logits // vocabulary_size)


def in_parts(part: _Function, hidden: torch.Tensor, targets: torch.Tensor, at_once: int) -> torch.Tensor:
    """`part` of hidden states [M, H], targets [M, K] and its number, for `at_once` positions at a time;
    repeated in the backward pass."""
    if len(hidden) <= at_once:
        return part(hidden, targets, 0)
    pairs = zip(hidden.split(at_once), targets.split(at_once), strict=True)
    return torch.cat([checkpoint(part, *pair, i, use_reentrant=False) for i, pair in enumerate(pairs)])


def logits_at(model: PreTrainedModel, positions: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """[M, V], in the model's dtype."""
    head = model.get_output_embeddings()
    chosen: list[bool] = []
    if head is None:
        logits = model(**inputs, use_cache=False).logits
    else:
        forward = head.forward

        def choose(hidden: torch.Tensor) -> torch.Tensor:
            chosen.append(True)
            return forward(hidden.flatten(0, 1)[positions][None])

        with replaced(head, choose):
            logits = model(**inputs, use_cache=False).logits
    # All logits, if the forward does not call an output layer.
    return logits.flatten(0, 1) if chosen else logits.flatten(0, 1)[positions]


@contextmanager
def replaced(layer: torch.nn.Module, forward: _Forward) -> Iterator[None]:
    """Hooks, such as FSDP2's, still run."""
    attributes = vars(layer)
    before = attributes.get("forward")  # it may be wrapped
    attributes["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before


def _logsumexp(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().logsumexp(-1)


def _gradient(
    logits: torch.Tensor, sums: torch.Tensor, targets: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """Gradient of log-probabilities, [M, V], in the logits' dtype."""
    made = (logits.float() - sums[:, None]).exp_().mul_(-gradient.sum(1, keepdim=True))
    return made.scatter_add_(1, targets, gradient).to(logits.dtype)


def _gradient_to_compile(
    logits: torch.Tensor, sums: torch.Tensor, targets: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """The same, fused into one kernel: a scatter needs [M, V] in float32."""
    tokens = torch.arange(logits.shape[1], device=logits.device)
    chosen = (tokens[None] == targets).float()
    return ((chosen - (logits.float() - sums[:, None]).exp()) * gradient).to(logits.dtype)


def _entropies(logits: torch.Tensor) -> torch.Tensor:
    return torch.special.entr(logits.float().softmax(-1)).sum(-1)


def _entropies_of_parts(logits: torch.Tensor) -> torch.Tensor:
    return torch.cat([_entropies(part) for part in logits.split(_ENTROPY_TOKENS)])


@dataclass(frozen=True, slots=True)
class LogitMath:
    """What is computed from logits, compiled or not."""

    logsumexp: _Function
    gradient: _Function
    entropies: _Function

    def chosen(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [M, K] of targets [M, K]."""
        return _Chosen.apply(logits, targets, self)


class _Chosen(torch.autograd.Function):
    """Keeps the logits in their dtype, and no other tensor of their size."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, math: LogitMath) -> torch.Tensor:
        sums = math.logsumexp(logits)
        ctx.save_for_backward(logits, sums, targets)
        ctx.math = math
        return logits.gather(-1, targets).float() - sums[:, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, sums, targets = ctx.saved_tensors
        of_one = targets.shape[1] == 1
        made = ctx.math.gradient if of_one else _gradient  # a comparison for each of many would be slower
        return made(logits, sums, targets, gradient), None, None


_EAGER = LogitMath(_logsumexp, _gradient, _entropies_of_parts)


def math_of(compiled: bool) -> LogitMath:
    return _compiled() if compiled else _EAGER


@cache
def _compiled() -> LogitMath:
    """Compiled at the first call, and for any number of positions at the second."""
    return LogitMath(*map(torch.compile, (_logsumexp, _gradient_to_compile, _entropies)))
