"""Micro-batches without padding, for GPUs. A line holds prompts, each followed by its completions:

    line          p0 p1 | r0 r1 r2 | s0 | q0 q1 q2 | t0 t1 | pad
    prompts        0  0    0  0  0    0    1  1  1    1  1    -1
    completions   -1 -1    0  0  0    1   -1 -1 -1    2  2    -1

Tokens attend to earlier tokens of their completion and prompt. FlexAttention skips other blocks; its backward
pass needs a GPU. Lines have few lengths: each compiles a kernel.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.attention.flex_attention import BlockMask

from trainers.batching import Row, TokenBatch, lay_out, same_prompts
from trainers.trajectory import Trajectory

_BLOCK = 128  # FlexAttention's
_LENGTHS = 8  # lengths within the budget
_QUERIES = 4 * _BLOCK  # queries at a time: 32 MB for 64k keys
_NONE = -1
_MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class _Line:
    free: int  # tokens
    rows: list[Row] = field(default_factory=list)

    def take(
        self, prompt: int, completions: Sequence[tuple[int, int]], *, must: bool
    ) -> list[tuple[int, int]]:
        """Take completions that fit, (length, index), longest first; returns the rest. A prompt is repeated
        only for a longer part. `must`: take the first in any case."""
        free, taken, rest = self.free - prompt, [], []
        for position, (length, index) in enumerate(completions):
            if length <= free or (must and position == 0):
                taken.append(index)
                free -= length
            else:
                rest.append((length, index))
        if not taken or (rest and not must and self.free - prompt - free < prompt):
            return list(completions)
        self.rows.append(tuple(taken))
        self.free = free
        return rest


def plan_lines(trajectories: Sequence[Trajectory], *, token_budget: int) -> list[list[Row]]:
    """Micro-batches of one line of at most `token_budget` tokens. A longer trajectory is alone; prompts
    repeat if their completions need several lines."""
    groups = []
    for members in same_prompts(trajectories):
        completions = sorted(((len(trajectories[index].token_ids), index) for index in members), reverse=True)
        groups.append((len(trajectories[members[0]].prompt_token_ids), completions))
    groups.sort(key=lambda group: -group[0] - sum(length for length, _ in group[1]))
    lines: list[_Line] = []
    for prompt, completions in groups:
        rest = completions
        for line in lines:
            if rest and line.free > prompt:
                rest = line.take(prompt, rest, must=False)
        while rest:
            lines.append(_Line(token_budget))
            rest = lines[-1].take(prompt, rest, must=True)
    return [line.rows for line in lines]


def line_length(tokens: int, *, token_budget: int) -> int:
    """A multiple of an eighth of the budget."""
    step = _BLOCK * math.ceil(token_budget / (_BLOCK * _LENGTHS))
    return step * math.ceil(tokens / step)


def pack(
    trajectories: Sequence[Trajectory],
    rows: Sequence[Row],
    *,
    token_budget: int,
    pad_token_id: int,
    device: torch.device,
) -> TokenBatch:
    ids: list[int] = []
    positions: list[int] = []
    prompts: list[int] = []
    completions: list[int] = []
    owners: list[int] = []
    parents: list[int] = []
    predictors: list[torch.Tensor] = []

    def write(tokens: Sequence[int], *, position: int, parent: int, prompt: int, owner: int) -> None:
        parents.extend([parent, *range(len(ids), len(ids) + len(tokens) - 1)])
        ids.extend(tokens)
        positions.extend(range(position, position + len(tokens)))
        prompts.extend([prompt] * len(tokens))
        completions.extend([owner if position else _NONE] * len(tokens))
        owners.extend([owner] * len(tokens))

    for number, row in enumerate(rows):
        prompt = trajectories[row[0]].prompt_token_ids
        write(prompt, position=0, parent=0, prompt=number, owner=row[0])
        last_of_prompt = len(ids) - 1
        for index in row:
            tokens = trajectories[index].token_ids
            before = torch.arange(len(ids) - 1, len(ids) - 1 + len(tokens))
            before[0] = last_of_prompt  # predicts the first token
            predictors.append(before)
            write(tokens, position=len(prompt), parent=last_of_prompt, prompt=number, owner=index)

    length = line_length(len(ids), token_budget=token_budget)

    def line(values: Sequence[int], padding: int) -> torch.Tensor:
        return torch.tensor([*values, *[padding] * (length - len(values))], device=device)

    attends = _mask(line(prompts, _NONE), line(completions, _NONE))
    return lay_out(
        [trajectories[index] for row in rows for index in row],
        input_ids=line(ids, pad_token_id)[None],
        attention_mask=_block_mask(attends, torch.arange(length, device=device)),
        position_ids=line(positions, 0)[None],
        owners=line(owners, _NONE)[None],
        parents=line(parents, 0)[None],
        predictors=predictors,
        device=device,
    )


def only_keys(mask: BlockMask, kept: torch.Tensor) -> BlockMask:
    """`kept` is bool [L]; others see only themselves."""
    attends = mask.mask_mod

    def restricted(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return attends(batch, head, query, key) & (kept[key] | (query == key))

    return _block_mask(restricted, torch.arange(len(kept), device=kept.device))


def _block_mask(attends: _MaskMod, tokens: torch.Tensor) -> BlockMask:
    """torch's `create_block_mask` takes a tensor [L, L], or a kernel that compiles for minutes."""
    length = len(tokens)
    batch = head = torch.zeros((), dtype=torch.long, device=tokens.device)
    counts = torch.cat(
        [
            attends(batch, head, queries[:, None], tokens[None, :])
            .view(-1, _BLOCK, length // _BLOCK, _BLOCK)
            .sum(dim=(1, 3))
            for queries in tokens.split(_QUERIES)
        ]
    )
    full = counts == _BLOCK * _BLOCK
    return BlockMask.from_kv_blocks(
        *_listed((counts > 0) & ~full),
        *_listed(full),
        BLOCK_SIZE=_BLOCK,
        mask_mod=attends,
        seq_lengths=(length, length),
    )


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks per row [1, 1, rows], and their columns first [1, 1, rows, columns]."""
    columns = blocks.byte().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], columns.int()[None, None]


def _mask(prompts: torch.Tensor, completions: torch.Tensor) -> _MaskMod:
    """Padding attends to padding: a softmax over nothing is NaN."""

    def attends(
        _batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        own = (completions[key] == _NONE) | (completions[key] == completions[query])
        return (query >= key) & (prompts[key] == prompts[query]) & own

    return attends
