"""The Ray cluster and the fleet of this test process: at most one of each.

They start with the first test that asks for them and end with the last test of their group, which the marker
`fleet` names: a fleet that idles takes a quarter of a core from other tests.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from tests.fleet.deployed import Fleet, ray_cluster


class Keeper:
    """What runs now.

    A cluster has one fleet in its life. Where Serve had been shut down and was started again, Ray 2.60 sent
    calls of the first Serve to the second one, whose controller then failed a check of Ray's.
    """

    def __init__(self) -> None:
        self._running: ExitStack | None = None  # the cluster, and the fleet in it
        self._fleet: tuple[str, Fleet] | None = None

    def fleet(
        self, name: str, roots: pytest.TempPathFactory, start: Callable[[Path], AbstractContextManager[Fleet]]
    ) -> Fleet:
        """The fleet of this name, started unless it runs; another one ends first.

        Args:
            start: gets an empty directory.
        """
        if self._fleet is None or self._fleet[0] != name:
            self.end()
            running = self._running = ExitStack()
            running.enter_context(ray_cluster(log_to_driver=False))
            self._fleet = name, running.enter_context(start(roots.mktemp(name)))
        return self._fleet[1]

    def end(self) -> None:
        """End the fleet and the cluster."""
        running, self._running, self._fleet = self._running, None, None
        if running is not None:
            running.close()


KEEPER = Keeper()


def _group(item: pytest.Item | None) -> str | None:
    mark = None if item is None else item.get_closest_marker("fleet")
    return None if mark is None else str(mark.args[0])


# -- hooks of the folders whose tests have fleets -----------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    try:
        return (yield)
    finally:
        if _group(item) != _group(nextitem):
            KEEPER.end()


def pytest_sessionfinish() -> None:
    """For a session that ends early."""
    KEEPER.end()
