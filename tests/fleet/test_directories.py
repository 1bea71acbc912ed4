"""Checkpoint directories that a user's own trainer saved become versions of a running fleet."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

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
        assert train_and_publish(http) == before + 2, "the fleet's own trainer goes on"


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


def test_an_older_version_of_the_store_is_published_by_its_path(fleet: Fleet) -> None:
    with fleet.client() as http:
        first = train_and_publish(http)
        wait_for(stored(fleet, first))
        expected = complete(http).token_ids
        train_and_publish(http)
        succeeded(http.post("/fleet/publish", json={"path": str(stored(fleet, first))}))
        assert all(answer.token_ids == expected for answer in on_every_replica(http).values())
        assert fleet.version() == first + 2


def _rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _other_model(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_attention_heads": 2}))


def _shard_missing(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")


def _only_bin(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def _cut_off(directory: Path) -> None:
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(5000)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda d: _rewrite(d, lambda t: t.pop(TENSOR)), f"{TENSOR!r} is missing"),
    "extra": (lambda d: _rewrite(d, lambda t: t.update(more=torch.ones(2))), "'more' is not a tensor"),
    "shape": (lambda d: _rewrite(d, lambda t: t.update({TENSOR: t[TENSOR][1:]})), "must have shape"),
    "dtype": (lambda d: _rewrite(d, lambda t: t.update({TENSOR: t[TENSOR].int()})), "of a dtype like"),
    "nan": (lambda d: _rewrite(d, lambda t: t[TENSOR].fill_(torch.nan)), "holds NaN or infinity"),
    "another model": (_other_model, "num_attention_heads is 2, and the fleet's model has 4"),
    "a shard": (_shard_missing, "model-00002-of-00002.safetensors"),
    "bin": (_only_bin, "has only ['pytorch_model.bin']"),
    "cut off": (_cut_off, "is it being written?"),
    "a file": (lambda d: (shutil.rmtree(d), d.write_text("x")), "and is a file"),
    "nothing": (shutil.rmtree, "does not exist"),
    "a link out": (
        lambda d: (shutil.rmtree(d), d.symlink_to(d.parent.parent / "model")),
        "expected a directory below one of",
    ),
}


# What the routes find and what replicas find; the routes' tests have all cases (`test_directory_publisher`).
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in ("missing", "nan") else pytest.mark.long) for case in WRONG],
)
def test_a_directory_that_is_wrong_is_refused_and_changes_nothing(fleet: Fleet, case: str) -> None:
    spoil, message = WRONG[case]
    directory = saved(fleet, 34)
    try:
        spoil(directory)
        with fleet.client() as http:
            version, before = fleet.version(), complete(http).token_ids
            answer = http.post("/fleet/publish", json={"path": str(directory)})
            assert answer.status_code == 400, answer.text
            assert message in answer.json()["error"]["message"]
            status = http.get("/fleet").json()
            assert status["lease"] is None and status["round"] is None
            assert all(answer.token_ids == before for answer in on_every_replica(http).values())
            assert fleet.version() == version
    finally:
        if directory.is_symlink() or directory.is_file():
            directory.unlink()
        elif directory.exists():
            shutil.rmtree(directory)


def test_a_path_outside_of_the_roots_is_refused(fleet: Fleet) -> None:
    with fleet.client() as http:
        for path in (str(fleet.checkpoint), f"{fleet.published}/../model", "/etc", "model"):
            answer = http.post("/fleet/publish", json={"path": path})
            assert answer.status_code == 400 and "below one of" in answer.json()["error"]["message"]


def test_nothing_is_published_into_the_round_of_another(fleet: Fleet) -> None:
    directory = saved(fleet, 35)
    with fleet.client() as http:
        version = fleet.version()
        succeeded(http.post("/init_weight_transfer_engine", json={"init_info": {}}))
        succeeded(http.post("/start_weight_update"))
        for route, body in (
            ("/fleet/publish", {"path": str(directory)}),
            ("/update_weights", {"weight_dir": str(directory)}),
        ):
            answer = http.post(route, json=body)
            assert answer.status_code == 409 and "'http' publishes" in answer.json()["error"]["message"]
        http.post("/finish_weight_update")  # incomplete: ends the round and gives the lease back
        assert fleet.version() == version
        succeeded(http.post("/fleet/publish", json={"path": str(directory)}))
