"""One Ray cluster and one Serve for all modules of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ray import serve

from app.http.auth import listening_address
from tests.fleet.deployed import ray_cluster
from tests.free_ports import free_ports


@pytest.fixture(scope="package", autouse=True)
def cluster() -> Iterator[None]:
    options = {
        "num_gpus": 4,  # in name only
        "runtime_env": {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[3])}},
        "log_to_driver": False,
        "namespace": "serve",  # Serve's own: names are looked up there
    }
    with ray_cluster(**options):
        yield


@pytest.fixture(scope="package")
def serving(cluster: None) -> Iterator[None]:
    """Serve, listening on all addresses."""
    assert listening_address() is None
    (port,) = free_ports(1)
    serve.start(http_options={"host": "0.0.0.0", "port": port})
    assert listening_address() == ("0.0.0.0", port)
    yield
    serve.shutdown()
