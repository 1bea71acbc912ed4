"""litellm, as proxies and agents call models."""

import json

import pytest

from tests.clients.environments import run
from tests.fleet.deployed import MODEL, Fleet

pytestmark = [
    pytest.mark.clients,
    pytest.mark.serve,
    pytest.mark.fleet("shared"),
    pytest.mark.long,  # its environment is installed from PyPI
    pytest.mark.timeout(600),
]


def test_its_calls(fleet: Fleet) -> None:
    found = run("litellm", "litellm_calls", fleet.url, model=MODEL)
    assert found["version"] == fleet.version()
    assert found["chat"] == found["streamed"]
    assert found["tokens"] == len(found["logprobs"]) == 8 and max(found["logprobs"]) <= 0
    assert json.loads(found["structured"])["colour"] in ("red", "blue")
    assert len(found["texts"]) == 2
    assert "nobody" in found["unknown"]
