import json
from typing import Any

import pytest
from typer.testing import CliRunner

from app.command.cli import cli
from tests.fake_http import JsonHandler, serving


def event(text: str, tokens: int, **more: Any) -> str:
    choice = {"index": 0, "delta": {"content": text}, "token_ids": [1] * tokens, **more}
    return f"data: {json.dumps({'choices': [choice], 'weight_version': 8 if more else None})}\n\n"


SPANS = [{"version": 7, "start": 0, "end": 2}, {"version": 8, "start": 2, "end": 3}]
STREAM = event("Hel", 2) + event("lo", 1, finish_reason="stop", weight_versions=SPANS) + "data: [DONE]\n\n"


REFUSALS = {503: ("replica_unavailable", "none serves"), 404: ("NotFoundError", "no such model")}


class Fleet(JsonHandler):
    bodies: list[Any]
    status: int

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        self.bodies.append(self.body())
        if self.status == 200:
            self.answer_text(200, STREAM, "text/event-stream")
        else:
            kind, message = REFUSALS[self.status]
            self.answer(self.status, {"error": {"type": kind, "message": message}})


def talk(*arguments: str, status: int = 200) -> Any:
    Fleet.bodies, Fleet.status = [], status
    with serving(Fleet) as port:
        url = f"http://127.0.0.1:{port}"
        return CliRunner().invoke(cli, ["chat", "--url", url, *arguments], input="hi\n\nand?\n")


def test_each_answer_has_its_versions_and_the_conversation_goes_on() -> None:
    result = talk("--system", "Be brief.", "--max-tokens", "9")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == lines[2] == "Hello"
    assert lines[1].startswith("versions 7 to 8, 3 tokens in ") and lines[1].endswith(", stop")
    first, second = Fleet.bodies
    assert first["model"] == "m" and first["max_tokens"] == 9
    assert [each["content"] for each in first["messages"]] == ["Be brief.", "hi"]
    assert [each["content"] for each in second["messages"]] == ["Be brief.", "hi", "Hello", "and?"]


@pytest.mark.parametrize("status", REFUSALS)
def test_a_refusal_ends_it_with_the_fleets_sentence(status: int) -> None:
    result = talk("--model", "math@3", status=status)
    assert (result.exit_code, result.stderr) == (1, f"slipstream: {REFUSALS[status][1]} ({status})\n")
    assert Fleet.bodies[0]["model"] == "math@3"
