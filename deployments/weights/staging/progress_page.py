"""A page of shared memory in which the workers of a replica tell how far they are, without being asked.

Each worker has a slot: a number that is odd while its text is being written, the text's length, the
text (JSON). One process writes a slot and one reads it.
"""

import json
import mmap
from collections.abc import Mapping
from typing import Any, Self

from deployments.weights.wire.shared_memory import SharedWords, create_mapping

_SLOT_BYTES = 16384
_HEAD_BYTES = 16
_LONGEST_MESSAGE = 2000  # characters, of which each may take six bytes


class StatePage(SharedWords):
    def __init__(self, mapping: mmap.mmap) -> None:
        super().__init__(mapping)
        self._bytes = self._words.cast("B")

    @classmethod
    def create(cls, workers: int) -> tuple[str, Self]:
        """A new page, in which nobody has told anything, and its segment's name, which the caller removes."""
        name, mapping = create_mapping(_SLOT_BYTES * workers)
        return name, cls(mapping)

    def __len__(self) -> int:
        return len(self._bytes) // _SLOT_BYTES

    def write(self, place: int, state: Mapping[str, Any] | None) -> None:
        """Tell a state with a "message", which is shortened if it is long; None: nothing yet."""
        text = b""
        if state is not None:
            text = json.dumps({**state, "message": state["message"][:_LONGEST_MESSAGE]}).encode()
        number, start = self._number(place), place * _SLOT_BYTES + _HEAD_BYTES
        self._words[number] += 1
        self._bytes[start : start + len(text)] = text
        self._words[number + 1] = len(text)
        self._words[number] += 1

    def read(self, place: int) -> dict[str, Any] | None:
        """What the worker told last; None if nothing yet, or if it is just telling something."""
        number, start = self._number(place), place * _SLOT_BYTES + _HEAD_BYTES
        before = self._words[number]
        text = bytes(self._bytes[start : start + self._words[number + 1]])
        if before % 2 or before != self._words[number] or not text:
            return None
        state: dict[str, Any] = json.loads(text)
        return state

    def _number(self, place: int) -> int:
        return place * _SLOT_BYTES // self._words.itemsize
