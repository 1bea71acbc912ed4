import base64
import json
from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from app.client.completions import Answer
from app.jobs.environments.environment import NO_ANSWER
from app.jobs.options import Extraction
from app.jobs.tasks import PromptFileTask, ReasoningGymTask
from examples import pictures


def said(text: str) -> Answer:
    return replace(NO_ANSWER, text=text, token_ids=[5, 6], finish_reason="length")


async def exact(entry: Mapping[str, Any], answer: str, details: Mapping[str, Any]) -> float:
    assert details["messages"][-1]["role"] == "assistant" and details["token_ids"] == [5, 6]
    assert details["finish_reason"] == "length"
    return float(answer == entry.get("right"))


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("8", "8"),
        ("6 + 2 = 8.", "8"),
        ("5 - 3", "3"),
        ("7-8", "8"),
        ("2 - 8 = -6", "-6"),
        ("The result is -12.5, I think", "-12.5"),
        ("She pays $1,234,567.50.", "1234567.50"),
        ("2, 345 or 12,34 or 1,2345", "2345"),
        ("2 \N{MINUS SIGN} 8 = \N{MINUS SIGN}6", "-6"),
        ("no idea", ""),
        ("", ""),
    ],
)
def test_the_last_number_is_graded(answer: str, number: str) -> None:
    assert Extraction.LAST_NUMBER.of(answer) == number


def test_the_first_line_is_what_comes_before_the_first_break() -> None:
    assert Extraction.FIRST_LINE.of("\n Paris \nand more") == "Paris"


SETTINGS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def sums(seed: int = 0) -> ReasoningGymTask:
    return ReasoningGymTask(
        "chain_sum", SETTINGS, instruction="Solve it.", seed=seed, extract=Extraction.LAST_NUMBER
    )


@pytest.mark.slow
def test_a_problem_is_the_same_every_time_and_differs_between_seeds() -> None:
    first = [sums().problem(number).messages[-1] for number in range(20)]
    assert first == [sums().problem(number).messages[-1] for number in range(20)]
    other = [sums(seed=1).problem(number).messages[-1] for number in range(20)]
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 10
    assert first[1:] != other[:-1]


@pytest.mark.slow  # imports reasoning-gym
def test_the_instruction_comes_before_the_question() -> None:
    messages = sums().problem(3).messages
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0]["content"] == "Solve it."


@pytest.mark.slow
async def test_the_score_is_the_tasks_own_of_the_last_number() -> None:
    task = sums()
    problem = task.problem(0)
    right = problem.entry["answer"]
    assert await task.score(problem, said(right)) == 1.0
    assert await task.score(problem, said(f"1 + 1 = {right}.")) == 1.0
    assert await task.score(problem, said(f"{right}, no: 1234")) < 0.5
    assert await task.score(problem, said("")) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), [("no_such_set", {}), ("chain_sum", {"min_terms": 0})])
def test_a_data_set_that_cannot_be_made_is_named(name: str, settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"reasoning-gym refuses '{name}'"):
        ReasoningGymTask(name, settings, instruction="", seed=0, extract=Extraction.WHOLE)


def prompts(path: Path, content: str | bytes) -> PromptFileTask:
    file = path / "p.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return PromptFileTask(file, exact, extract=Extraction.WHOLE)


async def test_prompts_of_a_file_repeat_and_are_scored_by_the_users_reward(tmp_path: Path) -> None:
    lines = '{"prompt": "2 + 2?", "right": "4"}\n\n{"messages": [{"role": "user", "content": "hi"}]}\n'
    task = prompts(tmp_path, lines)
    assert task.problems == 2
    assert task.problem(0) == task.problem(2)
    assert task.problem(0).messages == [{"role": "user", "content": "2 + 2?"}]
    assert task.problem(1).messages == [{"role": "user", "content": "hi"}]
    assert await task.score(task.problem(0), said(" 4 ")) == 1.0


CONVERSATION = '[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]'


@pytest.mark.parametrize(
    ("content", "contents"),
    [
        pytest.param(
            '{"prompt": "a\u2028b\x85c\u2029d"}\n', ["a\u2028b\x85c\u2029d"], id="separators in a text"
        ),
        pytest.param(b'\xef\xbb\xbf{"prompt": "a"}', ["a"], id="byte order mark"),
        pytest.param('{"prompt": "a"}\r\n{"prompt": "b"}\r\n', ["a"], id="lines of Windows"),
        pytest.param(f'{{"prompt": {CONVERSATION}}}', ["s", "u"], id="prompt is a conversation"),
        pytest.param(f'{{"messages": {CONVERSATION}}}', ["s", "u"], id="messages"),
        pytest.param(
            '{"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}',
            [[{"type": "text", "text": "x"}]],
            id="content in parts",
        ),
        pytest.param('{"prompt": "a"}\n{"prompt": "a"}', ["a"], id="the same twice"),
        pytest.param('{"messages": null, "prompt": "a"}', ["a"], id="a column without a value"),
        pytest.param(
            '{"prompt": [{"role": "assistant", "content": null, "tool_calls": [{"id": "c"}]}]}',
            [None],
            id="a call in place of a text",
        ),
    ],
)
def test_every_form_of_a_prompt_is_read(tmp_path: Path, content: str | bytes, contents: list[object]) -> None:
    assert [message["content"] for message in prompts(tmp_path, content).problem(0).messages] == contents


MUST_BE_AN_OBJECT = ":1 must be an object with 'messages'"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "p.jsonl must have at least one line"),
        (" \n\n", "p.jsonl must have at least one line"),
        ("{", ":1 must be a JSON object in one line"),
        ('{"prompt": "a"}\n\n{', ":3 must be a JSON object in one line"),
        ('[\n{"prompt": "a"}\n]', ":1 must be a JSON object in one line"),
        ('{"prompt": "a"}\r{"prompt": "b"}', ":1 must be a JSON object in one line"),
        ("prompt,answer\na,b\n", ":1 must be a JSON object in one line"),
        ("[" * 100_000, ":1 must be a JSON object in one line"),
        ('{"a": 1}', MUST_BE_AN_OBJECT),
        ('[{"prompt": "a"}]', MUST_BE_AN_OBJECT),
        ('{"prompt": null}', MUST_BE_AN_OBJECT),
        ('{"prompt": 3}', MUST_BE_AN_OBJECT),
        ('{"prompt": []}', MUST_BE_AN_OBJECT),
        ('{"prompt": ["a"]}', MUST_BE_AN_OBJECT),
        ('{"messages": "hi"}', MUST_BE_AN_OBJECT),
        ('{"messages": [{"content": "hi"}]}', MUST_BE_AN_OBJECT),
        ('{"messages": [{"role": "user"}]}', MUST_BE_AN_OBJECT),
        ('{"messages": [{"role": "user", "content": null}]}', MUST_BE_AN_OBJECT),
        ('{"messages": [{"role": "user", "content": 3}]}', MUST_BE_AN_OBJECT),
        (r'{"prompt": "\ud83d"}', ":1 must be text, got half of a surrogate pair"),
        (r'{"prompt": "x", "source": "\ud83d"}', ":1 must be text, got half of a surrogate pair"),
        ('{"prompt": "a"}\n{"prompt": "é"}'.encode("latin-1"), ":2 must be JSON Lines in UTF-8"),
        (b"PAR1\x00\xff", ":1 must be JSON Lines in UTF-8"),
    ],
)
def test_a_wrong_prompt_file_is_refused_with_its_name_and_the_line(
    tmp_path: Path, content: str | bytes, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        prompts(tmp_path, content)


@pytest.mark.parametrize(("name", "reason"), [("", "Is a directory"), ("missing", "No such file")])
def test_a_prompt_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{tmp_path / name} must be a file that can be read: {reason}"):
        PromptFileTask(tmp_path / name, exact, extract=Extraction.WHOLE)


def shown(*urls: str) -> str:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return json.dumps({"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]})


def test_images_of_a_prompt_file_are_sent_in_place_of_their_paths(tmp_path: Path) -> None:
    file = pictures.write(tmp_path / "pictures", 2)
    png = (tmp_path / "pictures" / "0.png").read_bytes()
    task = PromptFileTask(file, exact, extract=Extraction.WHOLE)
    data = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    assert task.problem(0).messages[0]["content"][0] == {"type": "image_url", "image_url": {"url": data}}
    assert pictures.right(task.problem(0).entry, f" {task.problem(0).entry['answer'].title()}.") == 1.0
    both = prompts(tmp_path, shown("http://a/b.png", data)).problem(0).messages[0]["content"]
    assert [part["image_url"]["url"] for part in both[:2]] == ["http://a/b.png", data]


@pytest.mark.parametrize(
    "url", ["missing.png", "p.jsonl", "cut.jpg", "big.png", "data:image/png;base64,YnJva2Vu", "data:a,@"]
)
def test_an_image_that_a_trainer_would_refuse_is_named_before_the_run(tmp_path: Path, url: str) -> None:
    Image.effect_noise((64, 64), 50).save(whole := BytesIO(), "JPEG")
    (tmp_path / "cut.jpg").write_bytes(whole.getvalue()[:-500])
    if url == "big.png":
        Image.new("1", (1 << 13, (1 << 13) + 1)).save(tmp_path / url)
    with pytest.raises(ValueError, match=r"p\.jsonl:2 must have images that can be read, got "):
        prompts(tmp_path, f'{{"prompt": "a"}}\n{shown(url)}')
