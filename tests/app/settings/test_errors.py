from typing import Any

import pytest
from pydantic import ValidationError

from app.settings.config import AppConfig
from tests.app.settings.complaints import complaint


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"engine": {"num_replica": 2}},
            "unknown setting 'engine.num_replica' (did you mean 'num_replicas'?)",
        ),
        (
            {"num_replicas": 2},
            "unknown setting 'num_replicas' (did you mean 'engine.num_replicas' or 'router.num_replicas'?)",
        ),
        (
            {"security": {"zzz": 2}},
            "unknown setting 'security.zzz' (expected one of token_file, user_token_file, checkpoint_roots)",
        ),
        (
            {"engine": {"num_replicas": 0}},
            "'engine.num_replicas': expected greater than 0, got 0",
        ),
        (
            {"weights": {"commit": "one"}},
            "'weights.commit': expected 'together' or 'rolling', got 'one'",
        ),
        (
            {"store": 3},
            "'store': expected a section with its own settings (path, keep, outside_versions), got 3",
        ),
        (
            {"engine": {"extra": 3}},
            "'engine.extra': expected a mapping, got 3",
        ),
        ({"model": ""}, "'model': expected a string with at least 1 character, got ''"),
        (
            {"trainer": {"optimizer": {"learning_rat": 1}}},
            "unknown setting 'trainer.optimizer.learning_rat' (did you mean 'learning_rate'?)",
        ),
        (
            {"trainer": {"optimizer": {"schedule": "cosine"}}},
            "'trainer.optimizer.total_steps': expected a number with schedule 'cosine', got none "
            "(the schedule ends there)",
        ),
    ],
)
def test_a_wrong_setting_gets_a_sentence(settings: dict[str, Any], sentence: str) -> None:
    assert complaint(**settings) == sentence


def test_every_wrong_setting_is_named_at_once() -> None:
    lines = complaint(engine={"num_replicas": 0}, weights={"transport": "tcp"}, modle="x").splitlines()
    assert [line.split("'")[1] for line in lines] == ["engine.num_replicas", "weights.transport", "modle"]


def test_a_long_value_is_cut_short() -> None:
    assert complaint(engine="x" * 100).endswith(f", got '{'x' * 56}...")


def test_pydantics_own_error_has_the_sentence() -> None:
    # Serve validates the arguments itself, and shows this text.
    with pytest.raises(ValidationError, match=r"unknown setting 'engine.num_replica' \(did you mean"):
        AppConfig.model_validate({"model": "m", "engine": {"num_replica": 2}})
