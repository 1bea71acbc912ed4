"""Micro-batches of bounded size. A row is a prompt and up to G completions side by side.

    columns   0 ............ P-1 | P ...... P+T-1 | P+T ... P+2T-1
    row 0     pad pad p0 p1 p2   | r0 r1 r2 pad   | s0 s1 pad pad
    row 1     p0  p1  p2 p3 p4   | r0 pad pad pad | pad pad pad pad

Completions do not attend to each other, and have the positions they have alone. Every attention kernel
accepts the mask of G = 1.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainers.losses import LearnedTokens
from trainers.trajectory import Trajectory

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Row = tuple[int, ...]  # trajectories that share a prompt
UNKNOWN_VERSION = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInputs:
    # On the CPU: a step has all of its batches at once.
    pixel_values: torch.Tensor  # float32 [patches of all images, values of a patch]
    image_grid_thw: torch.Tensor  # int64 [images, 3]
    sampled_placeholders: torch.Tensor  # bool [R, L]: the model sampled the token, and no image is there


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """R rows of L positions, and the M learned tokens of A completions, contiguous and ordered. A completion
    may have none."""

    input_ids: torch.Tensor  # int64 [R, L]
    # int64 [R, L] if G is 1; else bool [R, 1, L, L], or a BlockMask for packed lines
    attention_mask: "torch.Tensor | BlockMask"
    # int64 [R, L]; 0 at the first real token, and of padding. [3, R, L] with images
    position_ids: torch.Tensor
    owners: torch.Tensor  # int64 [R, L]: the token's trajectory, or one of several; -1: padding
    parents: torch.Tensor  # int64 [R, L], into R * L: the token before; arbitrary at position 0
    # int64 [M], into R * L: the position that predicts the token
    predictors: torch.Tensor
    targets: torch.Tensor  # int64 [M]
    completions: torch.Tensor  # int64 [M], 0 to A - 1
    lengths: torch.Tensor  # int64 [A], learned tokens
    rollout_logprobs: torch.Tensor  # float32 [M]
    constrained: torch.Tensor  # bool [M]: the rollout's log-probability is not the policy's
    advantages: torch.Tensor  # float32 [M]
    # int64 [M]; UNKNOWN_VERSION where it is not known
    versions: torch.Tensor
    images: ImageInputs | None = None
    # int16 [R * L, layers, top_k], see `trainers.routing_replay`; -1: the router chooses; None: all do
    routed: torch.Tensor | None = None
    # A teacher's most probable tokens, int64 and float32 [M, K]; None: not all completions have a teacher's
    teacher_token_ids: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None

    def learned(
        self,
        logprobs: torch.Tensor,
        old: torch.Tensor | None,
        reference: torch.Tensor | None,
        others: torch.Tensor | None = None,
    ) -> LearnedTokens:
        """`old` None: the first update of a step."""
        old = logprobs.detach() if old is None else old
        return LearnedTokens(
            logprobs=logprobs,
            old_logprobs=old,
            rollout_logprobs=torch.where(self.constrained, old, self.rollout_logprobs),
            advantages=self.advantages,
            completions=self.completions,
            lengths=self.lengths,
            versions=self.versions,
            reference_logprobs=reference,
            teacher_logprobs=self.teacher_logprobs,
            logprobs_of_teachers=others,
        )


def same_prompts(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        groups.setdefault((trajectory.prompt_token_ids, trajectory.images), []).append(index)
    return list(groups.values())


def plan_rows(trajectories: Sequence[Trajectory], *, token_budget: int, share_prompts: bool) -> list[Row]:
    rows: list[Row] = []
    alone = [[index] for index in range(len(trajectories))]
    for members in same_prompts(trajectories) if share_prompts else alone:
        prompt = trajectories[members[0]].prompt_token_ids
        longest = max(len(trajectories[index].token_ids) for index in members)
        slots = max(1, (token_budget - len(prompt)) // longest)
        rows += [tuple(members[i : i + slots]) for i in range(0, len(members), slots)]
    return rows


def plan_micro_batches(
    trajectories: Sequence[Trajectory], *, token_budget: int, share_prompts: bool = False
) -> list[list[Row]]:
    """Lists of rows of at most `token_budget` tokens with padding, longest first. A longer trajectory is
    alone."""

    def measure(row: Row) -> tuple[int, int, int]:
        longest = max(len(trajectories[index].token_ids) for index in row)
        return len(trajectories[row[0]].prompt_token_ids), len(row), longest

    def size(measures: Iterable[tuple[int, int, int]]) -> int:
        prompt, slots, longest = (max(column) for column in zip(*measures, strict=True))
        return prompt + slots * longest

    rows = plan_rows(trajectories, token_budget=token_budget, share_prompts=share_prompts)
    plan: list[list[Row]] = []
    measures: list[tuple[int, int, int]] = []
    for row in sorted(rows, key=lambda row: (-size([measure(row)]), row)):
        measures.append(measure(row))
        if plan and size(measures) * len(measures) <= token_budget:
            plan[-1].append(row)
        else:
            plan.append([row])
            measures = [measure(row)]
    return plan


def share_of_rank(plan: Sequence[list[Row]], *, rank: int, world_size: int) -> list[tuple[list[Row], bool]]:
    """One rank's micro-batches, and whether each counts. A sharded model gathers in every pass, so ranks get
    equal numbers."""
    rounds = math.ceil(len(plan) / world_size)
    mine = [(plan[i], True) for i in range(rank, len(plan), world_size)]
    filler = min(plan, key=len)
    return mine + [(filler, False)] * (rounds - len(mine))


def collate(
    trajectories: Sequence[Trajectory], rows: Sequence[Row], *, pad_token_id: int, device: torch.device
) -> TokenBatch:
    P = max(len(trajectories[row[0]].prompt_token_ids) for row in rows)
    G = max(len(row) for row in rows)
    T = max(len(trajectories[index].token_ids) for row in rows for index in row)
    L = P + G * T
    input_ids = torch.full((len(rows), L), pad_token_id, dtype=torch.int64)
    real = torch.zeros_like(input_ids, dtype=torch.bool)
    positions = torch.zeros_like(input_ids)
    owners = torch.full_like(input_ids, -1)
    parents = (torch.arange(input_ids.numel()) - 1).clamp(min=0).view_as(input_ids)
    predictors: list[torch.Tensor] = []

    def write(r: int, tokens: Sequence[int], *, column: int, position: int, owner: int) -> None:
        columns = slice(column, column + len(tokens))
        input_ids[r, columns] = torch.tensor(tokens)
        real[r, columns] = True
        owners[r, columns] = owner
        positions[r, columns] = torch.arange(position, position + len(tokens))

    for r, row in enumerate(rows):
        prompt = trajectories[row[0]].prompt_token_ids
        write(r, prompt, column=P - len(prompt), position=0, owner=row[0])
        for g, index in enumerate(row):
            tokens, column = trajectories[index].token_ids, P + g * T
            write(r, tokens, column=column, position=len(prompt), owner=index)
            before = r * L + column - 1 + torch.arange(len(tokens))
            before[0] = r * L + P - 1  # the last column of the prompt
            parents[r, column] = before[0]
            predictors.append(before)
    return lay_out(
        [trajectories[index] for row in rows for index in row],
        input_ids=input_ids.to(device),
        attention_mask=(real.long() if G == 1 else _side_by_side(real, P, G, T)).to(device),
        position_ids=positions.to(device),
        owners=owners.to(device),
        parents=parents.to(device),
        predictors=predictors,
        device=device,
    )


def lay_out(
    completions: Sequence[Trajectory],
    *,
    input_ids: torch.Tensor,
    attention_mask: "torch.Tensor | BlockMask",
    position_ids: torch.Tensor,
    owners: torch.Tensor,
    parents: torch.Tensor,
    predictors: Sequence[torch.Tensor],
    device: torch.device,
) -> TokenBatch:
    """`predictors` are int64 [tokens] of each completion."""
    masks = [True if each.loss_mask is None else each.loss_mask for each in completions]
    learned = torch.cat([_per_token(*pair, torch.bool) for pair in zip(completions, masks, strict=True)])
    lengths = torch.tensor([completion.learned_tokens for completion in completions])

    def of_learned(values: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(values))[learned].to(device)

    teacher_token_ids = teacher_logprobs = None
    teachers = [each.teacher for each in completions if each.teacher is not None]
    if len(teachers) == len(completions):
        teacher_token_ids, teacher_logprobs = (
            of_learned(
                torch.frombuffer(bytearray(getattr(each, name)), dtype=dtype).view(-1, each.top_k)
                for each in teachers
            )
            for name, dtype in (("token_ids", torch.int32), ("logprobs", torch.float32))
        )
    return TokenBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        owners=owners,
        parents=parents,
        predictors=of_learned(predictors),
        targets=of_learned(torch.tensor(completion.token_ids) for completion in completions),
        completions=torch.arange(len(completions)).repeat_interleave(lengths).to(device),
        lengths=lengths.to(device),
        rollout_logprobs=of_learned(torch.tensor(completion.logprobs) for completion in completions),
        constrained=of_learned(
            _per_token(each, each.constrained or False, torch.bool) for each in completions
        ),
        advantages=of_learned(_per_token(each, each.advantage, torch.float32) for each in completions),
        versions=of_learned(_versions(completion) for completion in completions),
        routed=_routed(completions, predictors, input_ids.numel(), device),
        teacher_token_ids=None if teacher_token_ids is None else teacher_token_ids.long(),
        teacher_logprobs=teacher_logprobs,
    )


def _routed(
    completions: Sequence[Trajectory],
    predictors: Sequence[torch.Tensor],
    positions: int,
    device: torch.device,
) -> torch.Tensor | None:
    """A shared prompt has those of its last completion. Raises ValueError: of two models."""
    shapes = {(each.layers, each.top_k) for each in (one.routed_experts for one in completions) if each}
    if len(shapes) > 1:
        raise ValueError(
            f"routed_experts: expected those of one model, got layers and top_k {sorted(shapes)}"
        )
    if not shapes:
        return None
    ((layers, top_k),) = shapes
    routed = torch.full((positions, layers, top_k), -1, dtype=torch.int16)
    for completion, before in zip(completions, predictors, strict=True):
        if (given := completion.routed_experts) is None:
            continue
        prompt, end = len(completion.prompt_token_ids), int(before[0]) + 1
        ids = torch.frombuffer(bytearray(given.ids), dtype=getattr(torch, given.dtype))
        ids = ids.view(-1, layers, top_k).to(torch.int16)
        routed[end - prompt : end], routed[before[1:]] = ids[:prompt], ids[prompt:]
    return routed.to(device)


def _per_token(completion: Trajectory, values: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).expand(len(completion.token_ids))


def _versions(completion: Trajectory) -> torch.Tensor:
    versions = torch.full((len(completion.token_ids),), UNKNOWN_VERSION, dtype=torch.int64)
    for span in completion.weight_versions:
        versions[span.start : span.end] = span.version
    return versions


def _side_by_side(real: torch.Tensor, P: int, G: int, T: int) -> torch.Tensor:
    """bool [R, 1, L, L]: causal, and completions do not attend to each other."""
    length = P + G * T
    segment = torch.cat([torch.zeros(P, dtype=torch.int64), 1 + torch.arange(G).repeat_interleave(T)])
    visible = (segment[:, None] == segment[None, :]) | (segment[None, :] == 0)
    allowed = visible & torch.ones(length, length, dtype=torch.bool).tril()
    # Padding attends to itself: a softmax over nothing is NaN.
    return (allowed & real[:, None, None, :]) | torch.eye(length, dtype=torch.bool)
