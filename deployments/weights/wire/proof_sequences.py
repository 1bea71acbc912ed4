"""The sequences of the proof of policy: replicas and trainer score them with each committed version.

They follow from the size of the vocabulary. Token ids are of its middle half, because special tokens, which
may stand for an image, are at its ends.
"""

import random
from dataclasses import dataclass

# One token longer than a block of the KV cache (16 on GPUs, 128 on CPUs): the prompt of one version would be
# found in a prefix cache that was not reset for the next.
SHORT, LONG = 17, 129


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofSequence:
    """Its score is the log-probability of `token` after `prompt`."""

    prompt: tuple[int, ...]
    token: int


def proof_sequences(count: int, vocabulary_size: int) -> list[ProofSequence]:
    """The first one has a prompt of `LONG` tokens, the others of `SHORT`."""
    chance = random.Random(vocabulary_size)
    low, span = vocabulary_size // 4, vocabulary_size // 2

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(low + int(chance.random() * span) for _ in range(length))

    lengths = [LONG if index == 0 else SHORT for index in range(count)]
    return [ProofSequence(prompt=tokens(length), token=tokens(1)[0]) for length in lengths]
