"""What a rank says of the batches that it is given."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.protocol.errors import InvalidRequest
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.trainer.one_worker import BATCH, small_spec, started
from trainers.settings import LossConfig


def with_version(version: int) -> list[Any]:
    return [
        each | {"weight_versions": [{"version": version, "start": 0, "end": len(each["token_ids"])}]}
        for each in BATCH
    ]


def test_rollouts_that_the_trainer_does_not_agree_with_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, controller: ControllerInProcess
) -> None:
    worker = started(small_spec(tmp_path), controller)
    metrics = worker.step(with_version(3), 4)
    assert metrics["staleness_max"] == 1 and not caplog.records, "older weights explain it"
    metrics = worker.step(with_version(5), 5)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert metrics["logprob_difference_mean"] > 0.05
    assert f"differ by {metrics['logprob_difference_mean']:.4f} on average" in record.getMessage()


def test_a_bad_batch_is_refused_and_changes_nothing(tmp_path: Path, controller: ControllerInProcess) -> None:
    worker = started(small_spec(tmp_path), controller)
    for change, sentence in (
        ({"loss_mask": [True]}, "loss_mask must have 2 entries"),
        ({"advantage": [1.0, float("nan")]}, "advantage must be a finite number"),
        ({"token_ids": [7, 9999]}, "token ids must lie in"),
    ):
        with pytest.raises(InvalidRequest, match=sentence):
            worker.step([BATCH[0] | change, BATCH[1]])
    for batch, sentence in (
        ([], "non-empty list"),
        ([{"token_ids": [1]}], "prompt_token_ids: Field required"),
    ):
        with pytest.raises(InvalidRequest, match=sentence):
            worker.step(batch)
    with pytest.raises(InvalidRequest, match="none of 1 trajectories"):
        worker.step([BATCH[0] | {"loss_mask": [False, False]}])
    assert worker.step(BATCH)["step"] == 1


def test_a_warm_start_needs_tokens_alone(tmp_path: Path, controller: ControllerInProcess) -> None:
    spec = small_spec(tmp_path)
    config = spec.config.model_copy(update={"loss": LossConfig(name="sft")})
    worker = started(replace(spec, config=config), controller)
    bare = [{name: each[name] for name in ("prompt_token_ids", "token_ids")} for each in BATCH]
    first, second = worker.step(bare), worker.step(bare)
    assert second["loss"] < first["loss"] and "importance_mean" not in first
