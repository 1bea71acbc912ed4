"""One fleet for all cases, with load, rounds and recorder; each case begins and ends with a whole fleet.

It ends with the last test of this folder: its load would slow whatever comes after it.
"""

from collections.abc import Iterator

import pytest

from tests.chaos.arena import Arena
from tests.chaos.launching import SETTINGS, launch
from tests.chaos.marked_weights import save_marked
from tests.waiting import until


@pytest.fixture(scope="package")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    root = tmp_path_factory.mktemp("chaos")
    with launch(root, save_marked(root / "model", 0), SETTINGS) as launched:
        arena = Arena(launched, root / "seen.jsonl")
        try:
            until(lambda: arena.trainer_answers() and arena.committed() >= 3, 120, "the first rounds")
            yield arena
        finally:
            arena.close()
