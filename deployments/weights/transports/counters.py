"""A page of counters in shared memory, which processes of one host write and read without a call."""

from typing import Self

from deployments.weights.wire.shared_memory import SharedWords, create_mapping

_WORD_BYTES = 8
ABSENT = -1  # before its writer has opened the page


class Counters(SharedWords):
    """Numbers, each with one writer."""

    @classmethod
    def create(cls, count: int) -> tuple[str, Self]:
        """A new page, all `ABSENT`, and the name of its segment, which the caller removes."""
        name, mapping = create_mapping(_WORD_BYTES * count)
        page = cls(mapping)
        for place in range(count):
            page[place] = ABSENT
        return name, page

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, place: int) -> int:
        return self._words[place]

    def __setitem__(self, place: int, value: int) -> None:
        self._words[place] = value
