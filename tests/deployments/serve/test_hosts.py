"""What is said about each host of a cluster. tests/fleet/test_hosts.py asks real ones."""

from dataclasses import replace

from deployments.serve.hosts import HostFacts, lacks, look

HERE = HostFacts(versions={"slipstream-rl": "0.1.0", "vllm": "0.32.0"})
MARKER = "/shared/state/.seen-by-hosts-1"


def said(found: HostFacts | str) -> list[str]:
    return list(lacks(found, HERE, MARKER, "/shared/state"))


def test_a_host_like_the_others_lacks_nothing() -> None:
    assert said(HERE) == []


def test_other_versions_and_missing_packages_are_named() -> None:
    assert said(HostFacts(versions={"vllm": "0.31.0"})) == [
        "expected slipstream-rl 0.1.0, as on the host that builds the application, got none",
        "expected vllm 0.32.0, as on the host that builds the application, got 0.31.0",
    ]


def test_a_directory_that_is_not_shared_is_told_from_a_missing_model() -> None:
    state, model = said(replace(HERE, unseen=[MARKER, "/models/mine"]))
    assert state.startswith("'state_dir': expected /shared/state to be the same directory on all hosts")
    assert model.startswith("'model': expected /models/mine, and it is not there")


def test_a_host_that_did_not_answer_says_why() -> None:
    assert said("no answer within 120 s") == ["no answer within 120 s"]


def test_this_host_sees_what_is_there(tmp_path: object) -> None:
    facts = look([str(tmp_path), f"{tmp_path}/none"])
    assert facts.unseen == [f"{tmp_path}/none"]
    assert "torch" in facts.versions
