"""Checkpoint directories that a user's own trainer saved become versions of a running fleet."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from app.command.cli import cli
from deployments.weights.store.checkpoint_files import INDEX
from tests.fleet.deployed import Fleet
from tests.fleet.talk import (
    PROMPT,
    Reference,
    complete,
    on_every_replica,
    saved,
    stored,
    succeeded,
    train_and_publish,
    wait_for,
)

pytestmark = [pytest.mark.serve, pytest.mark.fleet("shared"), pytest.mark.timeout(600)]

TENSOR = "model.layers.0.mlp.up_proj.weight"


def test_a_sharded_directory_is_served_and_may_be_deleted(fleet: Fleet) -> None:
    directory = saved(fleet, 31, shard_size="300KB")
    assert (directory / INDEX).is_file()
    prompts = [PROMPT, [40, 41, 42]]
    reference = Reference(directory)
    expected = [reference(prompt, 16) for prompt in prompts]
    with fleet.client() as http:
        assert expected != [complete(http, prompt).token_ids for prompt in prompts], "or it shows nothing"
        before = fleet.version()
        result = CliRunner().invoke(
            cli, ["publish", str(directory), "--label", "step-31", "--url", fleet.url]
        )
        assert result.exit_code == 0, result.stderr
        report = json.loads(result.stdout)
        assert (report["version"], report["label"]) == (before + 1, "step-31")
        assert report["verification"] == "publisher" and len(report["replicas"]) == 2
        wait_for(stored(fleet, before + 1))
        shutil.rmtree(directory)
        for prompt, tokens in zip(prompts, expected, strict=True):
            for answer in on_every_replica(http, prompt=prompt).values():
                assert (answer.token_ids, answer.version) == (tokens, before + 1)
        assert Reference(stored(fleet, before + 1))(PROMPT, 16) == expected[0]
        assert train_and_publish(http) == before + 2, "the fleet's own trainer continues"


@pytest.mark.parametrize(
    ("route", "field", "seed"), [("/fleet/publish", "path", 32), ("/update_weights", "weight_dir", 33)]
)
def test_a_directory_of_one_file_over_either_route(fleet: Fleet, route: str, field: str, seed: int) -> None:
    directory = saved(fleet, seed)
    with fleet.client() as http:
        before = fleet.version()
        succeeded(http.post(route, json={field: str(directory)}))
        expected = Reference(directory)(PROMPT, 16)
        for answer in on_every_replica(http).values():
            assert (answer.token_ids, answer.version) == (expected, before + 1)


def test_weights_that_replicas_refuse_change_nothing(fleet: Fleet) -> None:
    """What the routes refuse: `tests/app/http/test_directory_publisher.py`."""
    directory = saved(fleet, 34)
    tensors = load_file(directory / "model.safetensors")
    tensors[TENSOR].fill_(torch.nan)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with fleet.client() as http:
        version, before = fleet.version(), complete(http).token_ids
        answer = http.post("/fleet/publish", json={"path": str(directory)})
        assert answer.status_code == 400, answer.text
        assert "holds NaN or infinity" in answer.json()["error"]["message"]
        status = http.get("/fleet").json()
        assert status["lease"] is None and status["round"] is None
        assert all(answer.token_ids == before for answer in on_every_replica(http).values())
        assert fleet.version() == version
