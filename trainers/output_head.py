"""Logits of chosen positions, whatever a model does before and after its output matrix.

Logits are the largest tensor of a step, and few positions need them. `logits_to_keep` of transformers chooses
columns, the same of every row. Applying the output matrix to chosen hidden states by hand would choose single
positions, and would be wrong for the families that scale logits (Granite, Cohere, Falcon-H1) or cap them
(Gemma). So the model's own forward runs, and its output layer is given the chosen hidden states alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel


def logits_at(model: PreTrainedModel, positions: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    """The logits of M positions, [M, V], in the model's dtype.

    Args:
        positions: int64 [M], into the R * L positions of the inputs.
        inputs: what the model's forward takes; `input_ids` is [R, L].
    """
    with _choosing(model, positions) as chosen:
        logits = model(**inputs, use_cache=False).logits
    # A model without an output layer of its own, or whose forward does not call it, returns all logits.
    return logits.flatten(0, 1) if chosen else logits.flatten(0, 1)[positions]


@contextmanager
def _choosing(model: PreTrainedModel, positions: torch.Tensor) -> Iterator[list[bool]]:
    """Inside, the output layer sees hidden states [1, M, H]; the list is empty until it is called."""
    chosen: list[bool] = []

    def choose(_: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        chosen.append(True)
        return (arguments[0].flatten(0, 1)[positions][None], *arguments[1:])

    head = model.get_output_embeddings()
    if head is None:
        yield chosen
        return
    handle = head.register_forward_pre_hook(choose)
    try:
        yield chosen
    finally:
        handle.remove()
