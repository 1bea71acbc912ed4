from collections.abc import Sequence
from itertools import takewhile
from typing import Any

Message = dict[str, Any]  # "role" and "content"
WORDS = ("1", "2")  # equally many tokens


def probes(told: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """For `between`."""
    first, second = (
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": word}, *told] for word in WORDS
    )
    return first, second


def between(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """The tokens that follow the assistant's word in both renderings.

    Raises:
        ValueError: the chat template rewrites earlier messages.
    """
    pairs = zip(reversed(first), reversed(second), strict=False)
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    head = len(first) - common - 1
    if common == 0 or head < 0 or len(first) != len(second) or first[:head] != second[:head]:
        raise ValueError(
            "a conversation of several turns needs a chat template that writes each message after the one "
            f"before; the model's renders {len(first)} and {len(second)} tokens for two conversations that "
            "differ in one word, with other differences too"
        )
    return list(first[len(first) - common :])
