"""One fleet for all cases, with load, rounds and recorder; each case begins and ends with a whole fleet.

It ends with the last test of this folder: its load would slow whatever comes after it.
"""

from collections.abc import Iterator

import pytest

from tests.chaos.arena import Arena, fleet_under_load


@pytest.fixture(scope="package")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with fleet_under_load(tmp_path_factory.mktemp("chaos")) as arena:
        yield arena
