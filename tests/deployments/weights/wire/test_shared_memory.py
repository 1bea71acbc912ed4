import mmap
import re
from collections.abc import Iterator

import pytest

from deployments.weights.wire.ownership import DIRECTORY, owner
from deployments.weights.wire.shared_memory import (
    SharedWords,
    create_mapping,
    open_mapping,
    remove_segment,
)


@pytest.fixture
def segment() -> Iterator[str]:
    name, mapping = create_mapping(16)
    mapping[:5] = b"hello"
    yield name
    remove_segment(name)


def test_a_mapping_stays_valid_after_its_name_is_removed(segment: str) -> None:
    mapping = open_mapping(segment, mmap.ACCESS_READ, 16)
    remove_segment(segment)
    remove_segment(segment)  # not an error
    assert mapping[:5] == b"hello"
    with pytest.raises(ValueError, match=f"^segment '{segment}' does not exist on this host$"):
        open_mapping(segment, mmap.ACCESS_READ)


def test_a_segment_of_another_size_is_refused(segment: str) -> None:
    expected = f"^segment '{segment}' must have 32 bytes, it has 16$"
    with pytest.raises(ValueError, match=expected):
        open_mapping(segment, mmap.ACCESS_READ, 32)


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../slipstream-" + "0" * 32 + "-" + "0" * 32, "psm_1234", 5]
)
def test_only_names_of_our_own_segments_are_opened(name: object) -> None:
    expected = f"^expected the name of a Slipstream segment, got {re.escape(repr(name))}$"
    with pytest.raises(ValueError, match=expected):
        open_mapping(name, mmap.ACCESS_READ)  # type: ignore[arg-type]


def test_a_segment_that_does_not_fit_is_refused_with_the_sizes_and_leaves_no_name() -> None:
    own = owner().name("*")
    before = set(DIRECTORY.glob(own))
    with pytest.raises(OSError, match=rf"{1 << 60} bytes do not fit into /dev/shm \(\d+ bytes free\)"):
        create_mapping(1 << 60)
    assert set(DIRECTORY.glob(own)) == before


class Words(SharedWords):
    def first(self) -> int:
        return self._words[0]


def test_words_of_a_segment_are_seen_by_everybody_who_maps_it() -> None:
    name, mapping = create_mapping(8)
    words = Words.open(name)
    remove_segment(name)
    mapping[:8] = (-7).to_bytes(8, "little", signed=True)
    assert words.first() == -7
