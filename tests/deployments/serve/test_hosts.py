"""What is said about each host of a cluster. tests/fleet/test_hosts.py asks real ones."""

import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.serve import hosts
from deployments.serve.hosts import HostFacts, Probe, lacks, look
from tests.free_ports import free_ports

HERE = HostFacts(versions={"slipstream-rl": "0.1.0", "vllm": "0.32.0"}, model={"config.json": "1"})
MARKER = "/shared/state/.seen-by-hosts-1"


def said(found: HostFacts | str) -> list[str]:
    return list(lacks(found, HERE, {MARKER: "state_dir"}))


def test_a_host_like_the_others_lacks_nothing() -> None:
    assert said(HERE) == []


def test_other_versions_and_missing_packages_are_named() -> None:
    assert said(HostFacts(versions={"vllm": "0.31.0"})) == [
        "expected slipstream-rl 0.1.0, as on the host that builds the application, got none",
        "expected vllm 0.32.0, as on the host that builds the application, got 0.31.0",
    ]


def test_a_directory_that_is_not_shared_is_told_from_a_missing_model() -> None:
    state, model = said(replace(HERE, unseen=[MARKER, "/models/mine"], model={}))
    assert state.startswith("'state_dir': expected /shared/state to be the same directory on all hosts")
    assert state.endswith("and set 'state_dir' to a path on it, or set 'store.shared' to false")
    assert model.startswith("'model': expected /models/mine, and it is not there")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": {"config.json": "2"}}, "'model': .* got another config.json: copy the model again"),
        ({"model": {"config.json": "1", "x": "3"}}, "'model': .* got another x: copy the model again"),
        ({"shared_memory_bytes": 64 << 20}, "expected /dev/shm of 128 MiB or more, got 64 MiB: .*--shm-size"),
        ({"taken": ("0.0.0.0", 8000)}, "'http_options.port': expected port 8000 to be free, .*: end it, or"),
        (
            {"unreachable": {"b (10.0.0.2)": "timed out"}},
            r"no connection to b \(10.0.0.2\) at a port .* \(timed out\): let no firewall .*cluster.md",
        ),
    ],
)
def test_one_sentence_says_what_is_wrong_on_a_host_and_what_to_do(
    change: dict[str, Any], sentence: str
) -> None:
    (found,) = said(replace(HERE, **change))
    assert re.match(sentence, found)


def test_a_host_that_did_not_answer_says_why() -> None:
    assert said("no answer within 120 s") == ["no answer within 120 s"]


def test_this_host_sees_what_is_there(tmp_path: Path) -> None:
    facts = look([str(tmp_path), f"{tmp_path}/none"], "Qwen/Qwen3-8B", None)
    assert facts.unseen == [f"{tmp_path}/none"]
    assert "torch" in facts.versions
    assert facts.model == {} and facts.taken is None


def test_two_copies_of_a_model_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def files(**contents: str) -> dict[str, str]:
        for name, content in contents.items():
            (tmp_path / f"{name}.json").write_text(content)
        return dict(look([], str(tmp_path), None).model)

    monkeypatch.setattr(hosts, "READ_BYTES", 4)
    before = files(config="1", weights="12345")
    assert before == files(config="1", weights="54321"), "the version's digest tells these apart, at a join"
    assert before != files(config="2", weights="12345")
    assert before != files(config="1", weights="123456")


def test_a_port_is_taken_where_another_program_listens() -> None:
    (port,) = free_ports(1)
    http = ("127.0.0.1", port)
    assert look([], "a/b", http).taken is None
    with socket.create_server(http):
        assert look([], "a/b", http).taken == http


def test_a_host_that_does_not_accept_a_connection_is_unreachable() -> None:
    probe = Probe("127.0.0.1")
    there = probe.look([], "a/b", None).listening
    (closed,) = free_ports(1)
    assert there is not None
    assert list(probe.unreachable({"a": there, "b": ("127.0.0.1", closed)})) == ["b"]
