"""What every test of the project shares."""

from typing import Any

import pytest

FLEET = "tests/fleet/"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes a file stays in one, and all tests of the shared fleet do.

    xdist 3.8 ignores its own marks for groups with pytest 9.2, whose items have no `_nodeid`.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return FLEET if nodeid.startswith(FLEET) else nodeid.split("::", 1)[0]

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The fleet's tests first, which take longest; skip what is marked `gpu` where there is none."""
    items.sort(key=lambda item: not item.nodeid.startswith(FLEET))
    on_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not on_gpu:
        return
    import torch  # only if such a test was collected

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device here"))
