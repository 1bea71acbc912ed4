"""What every test of the project shares."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none; torch is imported only if such a test was collected."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device here"))
