from typing import Any

import pytest
from pydantic import ValidationError

from trainers.settings import (
    DEFAULTS,
    Aggregation,
    LearnerConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    Schedule,
    StepSettings,
    Strategy,
    TrainerConfig,
)


def problem(make: type[TrainerConfig | OptimizerConfig | LoraConfig | LossConfig], **settings: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        make(**settings)
    (error,) = caught.value.errors()
    return str(error["msg"])


@pytest.mark.parametrize("schedule", [Schedule.LINEAR, Schedule.COSINE])
def test_a_decaying_schedule_needs_an_end(schedule: Schedule) -> None:
    assert problem(OptimizerConfig, schedule=schedule) == (
        f"Value error, 'total_steps': expected a number with schedule '{schedule}', got none "
        "(the schedule ends there)"
    )


def test_settings_that_exclude_each_other_are_refused() -> None:
    assert "expected true or false with 'packed'" in problem(
        TrainerConfig, packed=True, activation_checkpointing="selective"
    )
    assert problem(TrainerConfig, world_size=2) == (
        "Value error, 'world_size': expected 1 with strategy 'single', got 2 "
        "(more than one rank needs strategy 'fsdp2')"
    )
    assert problem(TrainerConfig, drafter={"model": "head"}, lora={"name": "math"}) == (
        "Value error, 'drafter': expected none with a 'lora' that is published as an adapter, got one (it is "
        "published with a version of the model)"
    )
    assert TrainerConfig(strategy=Strategy.FSDP2, world_size=2).world_size == 2
    assert TrainerConfig(strategy=Strategy.FSDP2).world_size == 1


@pytest.mark.parametrize("name", ["learning_rate", "max_grad_norm"])
def test_a_step_has_no_infinite_settings(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: Input should be a finite number$"):
        StepSettings.read(f'{{"{name}": 1e999}}')  # JSON reads it as infinity


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"alpha": 0}, {"target_modules": ()}, {"name": ""}])
def test_the_settings_of_an_adapter_that_cannot_be_right_are_refused(wrong: dict[str, Any]) -> None:
    assert problem(LoraConfig, **({"name": "math"} | wrong))


def test_an_adapter_that_is_merged_has_no_name() -> None:
    merged = TrainerConfig(lora=LoraConfig(publish="merged", rank=4))
    assert merged.lora is not None and merged.published_adapter is None
    alone = TrainerConfig(lora=LoraConfig(name="math"))
    assert alone.published_adapter is alone.lora and TrainerConfig().published_adapter is None
    assert problem(LoraConfig) == "Value error, 'name': expected one for the adapter in the fleet, got none"
    assert problem(LoraConfig, publish="merged", name="math") == (
        "Value error, 'name': expected none with publish 'merged', got 'math' (what is published is a "
        "version of the model, under the model's name)"
    )


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
    assert problem(LossConfig, name="gpro") == (
        "Value error, 'name': expected one of ppo_clip, grpo, dr_grpo, dapo, gspo, cispo, rloo, "
        "reinforce_pp, sft, forward_kl, reverse_kl, jsd, or package.module:function, got 'gpro'"
    )
    assert "valid string" in problem(LossConfig, name=3)
    assert LossConfig(name="my.package:loss").name == "my.package:loss"


@pytest.mark.parametrize(
    ("name", "setting"),
    [("sft", "importance_cap"), ("sft", "clip_low"), ("rloo", "clip_high"), ("cispo", "clip_low")],
)
def test_a_setting_that_the_loss_does_not_read_is_refused(name: str, setting: str) -> None:
    assert problem(LossConfig, name=name, **{setting: 0.7}) == (
        f"Value error, '{setting}': expected none with the loss '{name}', which does not read it, got 0.7"
    )
