"""The sequences of the proof of policy: replicas and trainer score them with each committed version.

They follow from the size of the vocabulary. Token ids are from its middle half: special tokens, which may
stand for an image, are at its ends.
"""

import random
from dataclasses import dataclass

# One token longer than a KV cache block (16 on GPUs, 128 on CPUs): a prefix cache that was not reset would
# hold the prompt of the version before.
SHORT, LONG = 17, 129


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofSequence:
    prompt: tuple[int, ...]
    token: int


def proof_sequences(count: int, vocabulary_size: int) -> list[ProofSequence]:
    """One prompt of `LONG` tokens, the others `SHORT`."""
    chance = random.Random(vocabulary_size)
    low, span = vocabulary_size // 4, vocabulary_size // 2

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(low + int(chance.random() * span) for _ in range(length))

    lengths = [LONG if index == 0 else SHORT for index in range(count)]
    return [ProofSequence(prompt=tokens(length), token=tokens(1)[0]) for length in lengths]
