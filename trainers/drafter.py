"""Trains a drafter beside its policy, on detached hidden states of the policy's own forward pass.

The loss is the cross entropy of the following tokens. A rollout's are samples of the policy: up to noise this
is the cross entropy of its distribution, without its logits. Of EAGLE-3's training-time test only the first
step is made: hidden states are the policy's, never the drafter's own.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel

from trainers.batching import TokenBatch
from trainers.eagle3 import Eagle3Head, default_layers, load_in_place, write_head
from trainers.eagle3 import read_head as read_eagle3
from trainers.layers import decoder_layers
from trainers.model_config import needed
from trainers.mtp import MtpHead
from trainers.mtp import read_head as read_mtp
from trainers.output_head import in_parts, math_of, positions_at_once
from trainers.settings import DrafterConfig
from trainers.sources import DRAFTER, MTP, full_tensor
from trainers.step_metrics import Metrics

_EMBEDDINGS = 0  # layers that they have passed
_SUMS = ("loss", "agreed", "tokens")
MAX_GRAD_NORM = 1.0  # the drafter's


class TrainedDrafter:
    """An EAGLE-3 head, or the multi-token prediction in the model's checkpoint; every rank has all of it.

    Args:
        checkpoint: the model's, of which a head of its own is read.

    Attributes:
        has_own_checkpoint: it is no part of the model's.

    Raises:
        ValueError: the directory holds none, or one of another model.
    """

    def __init__(
        self,
        config: DrafterConfig,
        model: PreTrainedModel,
        checkpoint: Path,
        *,
        compiled: bool = False,
        packed: bool = False,
    ) -> None:
        self.learning_rate = config.learning_rate
        self.has_own_checkpoint = config.model is not None
        _check_embeddings(model)
        layers = decoder_layers(model)
        hooked = {_EMBEDDINGS: model.get_input_embeddings(), **dict(enumerate(layers, 1))}
        self.head: Eagle3Head | MtpHead
        if config.model is None:
            self._prefix, self._layers = MTP, [len(layers) + 1]
            self.head = read_mtp(model, checkpoint)
            hooked[len(layers) + 1] = model.base_model.norm
            ids = torch.arange(self.head.config.vocab_size)
        else:
            directory = Path(config.model)
            head = self.head = read_eagle3(directory)
            self._prefix, self._layers = DRAFTER, head.layers or default_layers(len(layers))
            _check_fits(head, self._layers, model, directory)
            ids = head.token_ids()
        self._own_output = self.head.lm_head if isinstance(self.head, Eagle3Head) else None
        self._models_output = model.get_output_embeddings()
        self._recorded: dict[int, torch.Tensor] = {}  # keys: layers passed
        self._is_recording = False
        for passed in (_EMBEDDINGS, *self._layers):
            hooked[passed].register_forward_hook(self._record(passed))
        self.head.config._attn_implementation = "flex_attention" if packed else "sdpa"
        device = next(model.parameters()).device
        self.head.to(device)
        for parameter in self.head.parameters():  # not its buffers, such as frequencies
            parameter.data = parameter.data.to(model.dtype)
        if compiled:
            self.head.decoder.compile()
        self._draft_ids = torch.full((self.head.config.vocab_size,), -1, device=device)
        self._draft_ids[ids] = torch.arange(len(ids), device=device)
        self._math = math_of(compiled)
        self._at_once = positions_at_once(len(ids), compiled=compiled)
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._output = torch.empty(0)  # the model's output matrix, in the updates of a step

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.head.parameters())

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.head.named_parameters(self._prefix.removesuffix("."))

    def state(self) -> dict[str, torch.Tensor]:
        """By the parameters' names; not copied."""
        return {self._prefix + name: tensor for name, tensor in self.head.state_dict().items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """By published names; not copied."""
        return self.head.tensors() if isinstance(self.head, MtpHead) else self.state()

    def load(self, tensors: Mapping[str, torch.Tensor], source: Path) -> None:
        """Copy published tensors in place. Raises ValueError, without changes, for another
        drafter's tensors."""
        own, read = (
            {name.removeprefix(DRAFTER): tensor for name, tensor in each.items()}
            for each in (self.tensors(), tensors)
        )
        load_in_place(own, read, source)

    def write(self, directory: Path) -> None:
        """Under its own names. Raises OSError."""
        assert isinstance(self.head, Eagle3Head), "a head of the model's checkpoint is saved with it"
        directory.mkdir(parents=True, exist_ok=True)
        write_head(self.head, directory)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep the hidden states of the model's next forward pass for `loss`."""
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False  # checkpointed layers run again in the backward pass

    def begin(self) -> None:
        """Call it before each update, on all ranks."""
        self._sums.zero_()
        self._recorded.clear()
        if self._own_output is None:
            self._output = full_tensor(self._models_output.weight).detach()

    def loss(self, batch: TokenBatch, total_tokens: int, *, counts: bool) -> torch.Tensor:
        """For the recorded micro-batch, divided by all micro-batches' learned tokens; in the metrics if it
        counts."""
        positions, targets = batch.position_ids, self._draft_ids[batch.targets]
        fused = self.head.fuse([self._recorded[passed] for passed in self._layers])
        hidden = self.head(
            self._recorded[_EMBEDDINGS],
            fused.flatten(0, 1)[batch.parents],
            (positions - 1).clamp(min=0),
            _mask(batch),
        )
        best: list[torch.Tensor] = []

        def part(hidden: torch.Tensor, targets: torch.Tensor, number: int) -> torch.Tensor:
            logits = self._logits(hidden)
            if number == len(best):  # not in recomputation
                best.append(logits.detach().argmax(-1))
            return self._math.chosen(logits, targets[:, None])[:, 0]

        read = hidden.flatten(0, 1)[batch.predictors]
        logprobs = in_parts(part, read, targets.clamp(min=0), self._at_once)
        predicted = positions.flatten()[batch.predictors] > 0  # no slot predicts a second token
        counted = predicted & (targets >= 0)
        loss = -torch.where(counted, logprobs, 0.0).sum() / total_tokens
        self._recorded.clear()
        if counts:
            agreed = counted & (torch.cat(best) == targets)
            self._sums += torch.stack(
                [each.double() for each in (loss.detach(), agreed.sum(), predicted.sum())]
            )
        return loss

    def metrics(self) -> Metrics:
        """The update's loss, and the share of tokens that the drafter ranked first."""
        if dist.is_initialized():
            dist.all_reduce(self._sums)
        sums = dict(zip(_SUMS, self._sums.tolist(), strict=True))
        return {"drafter_loss": sums["loss"], "drafter_agreement": sums["agreed"] / max(sums["tokens"], 1.0)}

    def clip(self) -> float:
        """Returns the gradient's length before clipping. One that is not finite is dropped."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters(), MAX_GRAD_NORM))
        if not math.isfinite(norm):
            self.head.zero_grad(set_to_none=True)
        return norm

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._own_output is None:
            return nn.functional.linear(hidden, self._output)
        made: torch.Tensor = self._own_output(hidden)
        return made

    def _record(self, passed: int) -> Callable[[torch.nn.Module, Any, Any], None]:
        def hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            if self._is_recording:
                self._recorded[passed] = (output[0] if isinstance(output, tuple) else output).detach()

        return hook


def _mask(batch: TokenBatch) -> torch.Tensor | BlockMask:
    """Without first tokens, which have no slot."""
    mask, kept = batch.attention_mask, batch.position_ids > 0  # neither has padding
    if isinstance(mask, BlockMask):
        from trainers.packed_lines import only_keys

        return only_keys(mask, kept[0])
    length = kept.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=kept.device).tril()
    allowed = (causal if mask.ndim == 2 else mask) & kept[:, None, None, :]
    return allowed | torch.eye(length, dtype=torch.bool, device=kept.device)


def _check_fits(head: Eagle3Head, layers: list[int], model: PreTrainedModel, directory: Path) -> None:
    own, depth = needed(model.config, "num_hidden_layers"), len(decoder_layers(model))
    for name in ("hidden_size", "vocab_size"):
        wanted, got = needed(model.config, name), getattr(head.config, name)
        if wanted != got:
            raise ValueError(f"{directory}: expected a drafter with the model's {name}, {wanted}, got {got}")
    if depth != own or len(set(layers)) != len(layers) or not 0 < min(layers) <= max(layers) <= depth:
        raise ValueError(
            f"{directory}: expected a drafter that reads different layers of 1 to {own}, "
            f"got {layers} of a model with {depth}"
        )
    ids = head.token_ids()
    if int(ids.min()) < 0 or int(ids.max()) >= head.config.vocab_size or len(ids.unique()) != len(ids):
        raise ValueError(f"{directory}: expected 'd2t' to name {len(ids)} different tokens of the model")
    output = full_tensor(model.get_output_embeddings().weight).float()
    if torch.equal(output, head.lm_head.weight.to(output.device)):
        raise ValueError(
            f"{directory}: expected a drafter with an output matrix of its own, got the model's (vLLM would "
            "share it)"
        )


def _check_embeddings(model: PreTrainedModel) -> None:
    embeddings = model.get_input_embeddings()
    if type(embeddings).forward is not torch.nn.Embedding.forward:
        raise ValueError(
            f"expected a model with plain embeddings for a drafter, got {type(embeddings).__name__}"
        )
