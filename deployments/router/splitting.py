"""How a list of prompts is divided over replicas: a pure policy, without Ray and HTTP."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

# A part with fewer sequences is not worth a replica of its own: a decoding step takes nearly as long for one
# sequence as for four.
MIN_SEQUENCES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The prompts from `start` to `stop` (exclusive) go to one replica."""

    replica_id: str
    start: int
    stop: int


def split_prompts(
    prompts: int, answers: int, loads: Mapping[str, int], *, least: int = MIN_SEQUENCES
) -> list[Share]:
    """Divide a list of prompts so that the replicas are equally loaded afterwards, as far as it can.

    A share is a run of neighbours in the list, because neighbours are often the same prompt, whose prefix is
    computed once. A replica that is so busy that its share would be too small gets none.

    Args:
        prompts: in the list, at least one.
        answers: to each prompt; they stay together.
        loads: sequences in flight, by replica.
        least: sequences of a share.

    Returns:
        Shares in the order of the list, which cover it; none if it is not to be split.
    """
    total = prompts * answers
    ordered = sorted(loads, key=lambda replica_id: (loads[replica_id], replica_id))
    for count in range(min(len(ordered), prompts), 1, -1):
        chosen = ordered[:count]
        level = (total + sum(loads[replica_id] for replica_id in chosen)) / count
        if level - loads[chosen[-1]] >= max(least, answers):
            return _shares(prompts, {each: (level - loads[each]) / total for each in chosen})
    return []


def _shares(prompts: int, fractions: Mapping[str, float]) -> list[Share]:
    shares, start, covered = [], 0, 0.0
    for replica_id, fraction in fractions.items():
        covered += fraction
        stop = math.floor(covered * prompts + 0.5)
        shares.append(Share(replica_id=replica_id, start=start, stop=stop))
        start = stop
    return shares
