"""verifiers: an environment with tools and several turns, evaluated, and rolled out with its training client.

A model with random weights calls no tool by itself. Each turn is forced to be a call, by `tool_choice` or, in
training, by a regular expression. Which call it is, the model decides. The tools are executed.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import HERE, shell
from tests.clients.recorder import Call, Record, recorded
from tests.documents import commands_of
from tests.fleet.deployed import MODEL, Fleet
from tests.fleet.talk import succeeded, train_and_publish

pytestmark = [
    pytest.mark.clients,
    pytest.mark.serve,
    pytest.mark.fleet("shared"),
    pytest.mark.long,
    pytest.mark.timeout(1800),
]

TALLY = HERE / "programs" / "tally"
EVALUATE, TRAIN = commands_of("docs/clients/verifiers.md", "vf-eval ")
GENERATE, CHAT = "/inference/v1/generate", "/v1/chat/completions"
ROUNDING = 6e-5  # verifiers writes log-probabilities with four decimals
TASKS, ROLLOUTS = 2, 2


@dataclass(frozen=True)
class Run:
    """The traces that verifiers wrote, and what it and the fleet said."""

    traces: list[dict[str, Any]]
    record: Record

    def sessions(self, path: str) -> list[list[Call]]:
        """The calls of each rollout, in order."""

        def session(call: Call) -> str:
            return call.headers["x-session-id"]

        return [list(calls) for _, calls in groupby(sorted(self.record.of(path), key=session), session)]


def roll_out(
    command: str, fleet: Fleet, directory: Path, before: Callable[[str, dict[str, str]], None] | None = None
) -> Run:
    with recorded(fleet.url, before) as record:
        printed = shell(
            "verifiers",
            command,
            directory,
            timeout_s=900,
            FLEET=record.url,
            MODEL=MODEL,
            CHECKPOINT=str(fleet.checkpoint),
            TALLY=str(TALLY),
            PYTHONPATH=str(TALLY),
            HOME=str(directory),
        )
    (file,) = directory.glob("outputs/*/traces.jsonl")
    episodes = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(episodes) == TASKS * ROLLOUTS
    assert all(episode["ok"] for episode in episodes), f"{episodes}\n{printed[-4000:]}"
    return Run([trace for episode in episodes for trace in episode["traces"]], record)


def messages(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of the one conversation: no message was rendered a second time."""
    nodes = trace["nodes"]
    assert [node.get("parent") for node in nodes] == [None, *range(len(nodes) - 1)]
    return [node["message"] for node in nodes]


def check_tools(trace: dict[str, Any]) -> None:
    """Several turns, each a call; the tools' answers and the reward are those of what the calls add up to."""
    asked, *turns = messages(trace)
    made = [turn["tool_calls"] for turn in turns if turn["role"] == "assistant"]
    answers = [turn["content"] for turn in turns if turn["role"] == "tool"]
    assert len(made) >= 2 and all(len(calls) == 1 for calls in made)
    assert len(answers) == len(made) - 1, "the last call ended the rollout"
    moves = [
        json.loads(call["arguments"])["amount"] * {"tally_add": 1, "tally_take": -1}[call["name"]]
        for (call,) in made
    ]
    totals = [sum(moves[: count + 1]) for count in range(len(moves))]
    assert answers == [f"total: {total}" for total in totals[:-1]]
    assert trace["metrics"]["calls"] == len(moves)
    target = trace["task"]["data"]["target"]
    assert str(target) in asked["content"]
    assert trace["rewards"]["exact"]["score"] == pytest.approx(1 / (1 + abs(target - totals[-1])))
    reached = totals[-1] >= target
    assert trace["stop_condition"] == ("reached" if reached else "max_turns")


def check_sessions(run: Run, path: str) -> None:
    sessions = run.sessions(path)
    assert {calls[0].headers["x-session-id"] for calls in sessions} == {trace["id"] for trace in run.traces}
    for calls in sessions:
        assert all(call.status == 200 for call in calls), [call.answer for call in calls]
        assert len({call.answer_headers["x-slipstream-replica"] for call in calls}) == 1


def check_tokens(run: Run) -> None:
    """Each turn begins with all tokens of the turns before it; the trace has these and their values."""
    sessions = {calls[0].headers["x-session-id"]: calls for calls in run.sessions(GENERATE)}
    for trace in run.traces:
        calls = sessions[trace["id"]]
        choices = [call.answer_json["choices"][0] for call in calls]
        seen = [
            call.json["token_ids"] + choice["token_ids"] for call, choice in zip(calls, choices, strict=True)
        ]
        for before, call in zip(seen[:-1], calls[1:], strict=True):
            assert call.json["token_ids"][: len(before)] == before
        assert [token for node in trace["nodes"] for token in node.get("token_ids", [])] == seen[-1]
        said = [node for node in trace["nodes"] if node["sampled"]]
        assert len(said) == len(choices)
        for node, choice in zip(said, choices, strict=True):
            sampled = [t for t, mine in zip(node["token_ids"], node["mask"], strict=True) if mine]
            assert sampled == choice["token_ids"]
            values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            assert node["logprobs"] == pytest.approx(values, abs=ROUNDING)
            assert max(values) <= 0 and min(values) < 0, "one of the tokens was not forced"


def test_an_environment_with_tools_is_evaluated(fleet: Fleet, tmp_path: Path) -> None:
    run = roll_out(EVALUATE, fleet, tmp_path)
    for trace in run.traces:
        check_tools(trace)
    check_sessions(run, CHAT)
    assert all(call.json["tool_choice"] == "required" for call in run.record.of(CHAT))


def test_the_training_client_gets_the_tokens_of_every_turn(fleet: Fleet, tmp_path: Path) -> None:
    run = roll_out(TRAIN, fleet, tmp_path)
    for trace in run.traces:
        check_tools(trace)
    check_sessions(run, GENERATE)
    check_tokens(run)
    with fleet.client() as client:
        for call in run.record.of(GENERATE):
            check_answer(
                call, succeeded(client.post("/v1/completions", json=completion_of(call.json))).json()
            )


def completion_of(body: dict[str, Any]) -> dict[str, Any]:
    """The same prompt for another route."""
    named = {"model": body["model"], "prompt": body["token_ids"], "return_token_ids": True}
    return body["sampling_params"] | named


def check_answer(call: Call, other: dict[str, Any]) -> None:
    (choice,), (expected,) = call.answer_json["choices"], other["choices"]
    assert call.answer_json["weight_version"] == other["weight_version"]
    assert choice["token_ids"] == expected["token_ids"]
    values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert values == pytest.approx(expected["logprobs"]["token_logprobs"], abs=1e-3)


def test_an_update_between_turns_is_harmless(fleet: Fleet, tmp_path: Path) -> None:
    turns: dict[str, int] = {}
    lock = threading.Lock()
    updates: list[int] = []

    def before(path: str, headers: dict[str, str]) -> None:
        """A round before the second turn of the first rollout that comes to it."""
        if path != GENERATE:
            return
        with lock:
            session = headers["x-session-id"]
            turns[session] = turns.get(session, 0) + 1
            if turns[session] == 2 and not updates:
                with fleet.client() as client:
                    updates.append(train_and_publish(client))

    was = fleet.version()
    run = roll_out(TRAIN, fleet, tmp_path, before)
    for trace in run.traces:
        check_tools(trace)
    check_sessions(run, GENERATE)
    check_tokens(run)
    assert updates == [was + 1] == [fleet.version()]
    versions = [[call.answer_json["weight_version"] for call in calls] for calls in run.sessions(GENERATE)]
    assert all(each == sorted(each) and set(each) <= {was, was + 1} for each in versions)
    assert [was, was + 1] in [each[:2] for each in versions], "the rollout that waited for the round"
