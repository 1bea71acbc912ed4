from typing import Any

import pytest
from pydantic import ValidationError

from trainers.loss_settings import DEFAULTS, Aggregation, LossConfig
from trainers.settings import LearnerConfig


def problem(**settings: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        LossConfig(**settings)
    (error,) = caught.value.errors()
    return str(error["msg"])


def test_settings_from_before_losses_had_names_mean_the_same() -> None:
    config = LossConfig(clip_low=0.1, clip_high=0.3, aggregation=Aggregation.SEQUENCE, max_tokens=16)
    assert config.name == "ppo_clip" and config.clip_high == 0.3 and config.importance_cap == 2.0
    assert LossConfig().aggregation is Aggregation.TOKEN


def test_each_loss_has_the_defaults_of_its_paper_and_they_can_be_changed() -> None:
    assert LossConfig(name="grpo").aggregation is Aggregation.SEQUENCE
    assert LossConfig(name="dr_grpo").aggregation is Aggregation.CONSTANT
    assert (LossConfig(name="dapo").clip_low, LossConfig(name="dapo").clip_high) == (0.2, 0.28)
    assert LossConfig(name="gspo").clip_high == 4e-4
    changed = LossConfig(name="gspo", clip_high=1e-3, aggregation=Aggregation.TOKEN)
    assert (changed.clip_low, changed.clip_high, changed.aggregation) == (3e-4, 1e-3, Aggregation.TOKEN)


@pytest.mark.parametrize("name", DEFAULTS)
def test_written_settings_are_read_again(name: str) -> None:
    config = LearnerConfig(loss=LossConfig(name=name))
    assert LearnerConfig(**config.model_dump()) == config
    assert LearnerConfig.model_validate_json(config.model_dump_json()) == config


def test_a_loss_that_does_not_exist_is_refused_with_those_that_do() -> None:
    assert problem(name="gpro") == (
        "Value error, 'name': expected one of ppo_clip, grpo, dr_grpo, dapo, gspo, cispo, rloo, "
        "reinforce_pp, sft, or package.module:function, got 'gpro'"
    )
    assert "valid string" in problem(name=3)
    assert LossConfig(name="my.package:loss").name == "my.package:loss"


@pytest.mark.parametrize(
    ("name", "setting"),
    [("sft", "importance_cap"), ("sft", "clip_low"), ("rloo", "clip_high"), ("cispo", "clip_low")],
)
def test_a_setting_that_the_loss_does_not_read_is_refused(name: str, setting: str) -> None:
    assert problem(name=name, **{setting: 0.7}) == (
        f"Value error, '{setting}': expected none with the loss '{name}', which does not read it, got 0.7"
    )


def test_options_are_for_losses_of_ones_own() -> None:
    assert "only a loss of your own" in problem(name="grpo", options={"x": 1})
    assert LossConfig(name="a:b", options={"x": 1}).options == {"x": 1}
