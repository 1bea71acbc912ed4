"""One Ray cluster for all modules of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

STARTS = 2  # Ray waits 30 s for its own processes, which is not enough on a busy host


@pytest.fixture(scope="package", autouse=True)
def cluster() -> Iterator[None]:
    for attempt in range(1, STARTS + 1):
        try:
            ray.init(
                address="local",
                num_cpus=2,
                num_gpus=4,  # in name only
                include_dashboard=False,
                runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[3])}},
                log_to_driver=False,
                namespace="serve",  # Serve's own: names are looked up there
            )
            break
        except Exception:  # Ray has many for a cluster that does not start in time
            ray.shutdown()
            if attempt == STARTS:
                raise
    yield
    ray.shutdown()
