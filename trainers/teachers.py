"""Checks a teacher's `trajectory.TeacherLogprobs` before a step."""

from collections.abc import Sequence

import numpy as np

from trainers.settings import LossConfig
from trainers.trajectory import TeacherLogprobs, Trajectory


def check_teachers(trajectories: Sequence[Trajectory], loss: LossConfig, vocabulary_size: int) -> None:
    """Raises ValueError for log-probabilities that are absent or do not fit."""
    for number, each in enumerate(trajectories):
        if each.teacher is not None and (
            found := _problem(each.teacher, len(each.token_ids), vocabulary_size)
        ):
            raise ValueError(f"trajectory {number}: teacher: {found}")
    sizes = [0 if each.teacher is None else each.teacher.top_k for each in trajectories]
    if loss.has_teacher and (min(sizes) == 0 or min(sizes) < max(sizes)):
        raise ValueError(
            f"trajectory {sizes.index(min(sizes))}: teacher: the loss {loss.name!r} expects one of each "
            f"trajectory, with one top_k, got {min(sizes) or 'none'}, and {max(sizes) or 'none'} of others"
        )


def _problem(teacher: TeacherLogprobs, tokens: int, vocabulary_size: int) -> str | None:
    expected = 4 * tokens * teacher.top_k
    if not len(teacher.token_ids) == len(teacher.logprobs) == expected:
        return (
            f"expected {expected} bytes of token_ids and of logprobs, for {teacher.top_k} at each of "
            f"{tokens} tokens, got {len(teacher.token_ids)} and {len(teacher.logprobs)}"
        )
    ids = np.sort(np.frombuffer(teacher.token_ids, np.int32).reshape(tokens, teacher.top_k))
    logprobs = np.frombuffer(teacher.logprobs, np.float32).reshape(tokens, teacher.top_k)
    if not 0 <= ids.min() <= ids.max() < vocabulary_size:
        return f"token_ids must lie in [0, {vocabulary_size}), got {ids.min()} to {ids.max()}"
    if (ids[:, 1:] == ids[:, :-1]).any():
        return "the token_ids at a token must differ, got one twice"
    if not np.isfinite(logprobs).all():
        return "logprobs must be finite numbers, got NaN or infinity"
    if (total := np.exp(logprobs).sum(1).max()) > 1.01:  # allows rounding
        return f"the probabilities at a token must have a sum of at most 1, got {total:.3f}"
    return None
