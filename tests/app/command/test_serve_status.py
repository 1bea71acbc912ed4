from typing import Any

import pytest

from app.command.serve_status import Verdict, changes, read_status


def details(status: str, ready: int, message: str = "") -> dict[str, Any]:
    replicas = [{"state": "RUNNING"}] * ready + [{"state": "STARTING"}] * (2 - ready)
    rollout = {"replicas": replicas, "target_num_replicas": 2, "message": message}
    application = {"status": status, "message": message, "deployments": {"Rollout": rollout}}
    return {"applications": {"slipstream": application}}


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        ("DEPLOYING", Verdict.STARTING),
        ("RUNNING", Verdict.RUNNING),
        ("DEPLOY_FAILED", Verdict.FAILED),
        ("UNHEALTHY", Verdict.UNHEALTHY),
    ],
)
def test_each_status_of_serve_has_a_verdict(status: str, verdict: Verdict) -> None:
    assert read_status(details(status, 1), "slipstream").verdict is verdict


def test_an_application_that_serve_does_not_list_yet_is_starting() -> None:
    assert read_status({"applications": {}}, "slipstream").verdict is Verdict.STARTING


def test_only_deployments_whose_readiness_changed_are_listed() -> None:
    first, second = (read_status(details("DEPLOYING", ready), "slipstream") for ready in (1, 2))
    assert changes(None, first) == ["Rollout: 1 of 2 ready"]
    assert changes(first, first) == []
    assert changes(first, second) == ["Rollout: 2 of 2 ready"]


def test_a_message_of_application_and_deployment_is_shown_once() -> None:
    assert read_status(details("DEPLOY_FAILED", 0, "no weights"), "slipstream").message == "no weights"
