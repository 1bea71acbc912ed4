from typing import Any

import pytest

from app.command.deploy import DEPLOYMENTS, LIVE, divide, restarting
from app.settings.config import parse_config
from deployments.protocol.ledger_config import LedgerConfig


def application(**settings: Any) -> dict[str, Any]:
    args = {"model": "m", **settings}
    return divide({"name": "slipstream", "args": args}, parse_config(args))


def user_config(made: dict[str, Any], name: str) -> Any:
    return next(each for each in made["deployments"] if each["name"] == name)["user_config"]


def test_live_settings_are_in_no_argument() -> None:
    made = application(
        router={"max_ongoing_requests": 5, "num_replicas": 2, "max_body_bytes": 1000},
        weights={"commit": "rolling", "transport": "gloo"},
    )
    assert made["args"] == {
        "model": "m",
        "router": {"max_body_bytes": 1000},
        "weights": {"transport": "gloo"},
    }
    assert user_config(made, "router")["max_ongoing_requests"] == 5
    assert user_config(made, "controller")["commit"] == "rolling"
    assert next(each for each in made["deployments"] if each["name"] == "router")["num_replicas"] == 2


def test_a_removed_live_setting_returns_to_its_default() -> None:
    assert user_config(application(), "controller")["commit"] == "together"
    assert set(user_config(application(), "router")) == set(LIVE["router"])


def test_other_overrides_of_a_deployment_stay() -> None:
    args = {"model": "m"}
    own = [{"name": "router", "health_check_period_s": 3}, {"name": "rollout", "logging_config": {}}]
    made = divide({"args": args, "deployments": own}, parse_config(args))
    assert {each["name"] for each in made["deployments"]} == {"router", "rollout", *DEPLOYMENTS.values()}
    assert (
        next(each for each in made["deployments"] if each["name"] == "router")["health_check_period_s"] == 3
    )


def test_what_the_controller_takes_is_the_ledgers() -> None:
    assert set(LIVE["weights"]) <= set(LedgerConfig.model_fields)


def test_the_setting_is_named() -> None:
    old, new = (application(engine={"max_num_seqs": most, "dtype": "float32"})["args"] for most in (1, 2))
    assert restarting(old, new) == ["engine.max_num_seqs"]


@pytest.mark.parametrize("section", ["trainer", "engine", "store"])
def test_an_empty_section_stays_unless_its_settings_are_live(section: str) -> None:
    made = application(**{section: {}, "router": {}})["args"]
    assert made[section] == {} and "router" not in made
