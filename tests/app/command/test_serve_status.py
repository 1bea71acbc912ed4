from typing import Any

import pytest

from app.command.serve_status import Verdict, news, read_status


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
def test_serves_words_become_a_verdict(status: str, verdict: Verdict) -> None:
    assert read_status(details(status, 1), "slipstream").verdict is verdict


def test_an_application_that_serve_does_not_know_yet_is_starting() -> None:
    assert read_status({"applications": {}}, "slipstream").verdict is Verdict.STARTING


def test_only_changes_are_news() -> None:
    first, second = (read_status(details("DEPLOYING", ready), "slipstream") for ready in (1, 2))
    assert news(None, first) == ["Rollout: 1 of 2 ready"]
    assert news(first, first) == []
    assert news(first, second) == ["Rollout: 2 of 2 ready"]


def test_a_message_that_is_said_twice_is_shown_once() -> None:
    assert read_status(details("DEPLOY_FAILED", 0, "no weights"), "slipstream").message == "no weights"
