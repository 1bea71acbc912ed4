"""Checkpoint directories that a user's own trainer saved become versions of a running fleet."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from app.command.cli import cli
from deployments.weights.store.checkpoint_files import INDEX, WHOLE
from deployments.weights.store.uploads import DELTA
from tests.fleet import talk
from tests.fleet.deployed import Fleet

pytestmark = [pytest.mark.serve, pytest.mark.fleet("shared"), pytest.mark.timeout(600)]


def test_a_sharded_directory_is_served_and_may_be_deleted(fleet: Fleet) -> None:
    directory = talk.saved(fleet, 31, shard_size="300KB")
    assert (directory / INDEX).is_file()
    prompts = [talk.PROMPT, [40, 41, 42]]
    reference = talk.Reference(directory)
    expected = [reference(prompt, 16) for prompt in prompts]
    with fleet.client() as http:
        assert expected != [talk.complete(http, prompt).token_ids for prompt in prompts], (
            "or it shows nothing"
        )
        before = fleet.version()
        result = CliRunner().invoke(
            cli, ["publish", str(directory), "--label", "step-31", "--url", fleet.url]
        )
        assert result.exit_code == 0, result.stderr
        report = json.loads(result.stdout)
        assert (report["version"], report["label"]) == (before + 1, "step-31")
        assert "digests" in report["checks"] and len(report["replicas"]) == 2
        talk.wait_for(talk.stored(fleet, before + 1))
        shutil.rmtree(directory)
        for prompt, tokens in zip(prompts, expected, strict=True):
            for answer in talk.on_every_replica(http, prompt=prompt).values():
                assert (answer.token_ids, answer.version) == (tokens, before + 1)
        assert talk.Reference(talk.stored(fleet, before + 1))(talk.PROMPT, 16) == expected[0]
        assert talk.train_and_publish(http) == before + 2, "the fleet's own trainer continues"


def test_a_difference_at_a_url_changes_the_stored_version_that_was_uploaded_before(fleet: Fleet) -> None:
    bucket = fleet.published / "bucket"
    with fleet.client() as http:
        before = talk.train_and_publish(http)
        base = talk.wait_for(talk.stored(fleet, before))
        changed = fleet.published / "changed"
        changed.mkdir(parents=True)
        tensors = load_file(base / WHOLE)
        tensors["model.norm.weight"] = -tensors["model.norm.weight"]
        save_file(tensors, changed / WHOLE)
        shutil.copyfile(base / "config.json", changed / "config.json")
        reference = talk.Reference(changed)(talk.PROMPT, 16)
        assert reference != talk.complete(http, talk.PROMPT).token_ids
        for command in (
            ["upload", str(base), f"file://{bucket}"],
            ["upload", str(changed), f"file://{bucket}", "--base", str(base)],
        ):
            result = CliRunner().invoke(cli, command)
            assert result.exit_code == 0, result.stderr
        assert (bucket / changed.name / DELTA).is_file()
        shutil.rmtree(bucket / base.name)
        result = CliRunner().invoke(cli, ["publish", result.stdout.strip(), "--url", fleet.url])
        assert result.exit_code == 0, result.stderr
        for answer in talk.on_every_replica(http).values():
            assert (answer.token_ids, answer.version) == (reference, before + 1)
        assert talk.train_and_publish(http) == before + 2
