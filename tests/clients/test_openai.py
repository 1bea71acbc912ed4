"""The OpenAI client against the fleet, as any user's program would use it."""

import json

import openai
import pytest

from tests.fleet.deployed import MODEL, Fleet

pytestmark = [pytest.mark.clients, pytest.mark.serve, pytest.mark.fleet("shared"), pytest.mark.timeout(300)]

COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(fleet: Fleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)


def test_models_names_the_served_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_chat_answers_with_versions(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, n=2, temperature=1)
    assert len(answer.choices) == 2
    assert answer.usage is not None and answer.usage.completion_tokens > 0
    assert answer.model_extra is not None and answer.model_extra["weight_version"] >= 0
    for choice in answer.choices:
        assert choice.model_extra is not None
        assert choice.model_extra["weight_versions"][-1]["end"] <= 8


def test_streamed_chat_equals_the_answer_in_one_piece(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-1].model_extra is not None and "weight_version" in chunks[-1].model_extra
    last = [chunk for chunk in chunks if chunk.choices][-1].choices[0]
    assert last.model_extra is not None and last.model_extra["weight_versions"][0]["start"] == 0


def test_completions_of_several_prompts_have_spans_per_choice(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "bc"], max_tokens=3, n=2, temperature=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all("weight_versions" in (choice.model_extra or {}) for choice in answer.choices)


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=2, temperature=0
    )
    content = answer.choices[0].logprobs.content
    assert content and all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in content)


def test_structured_output(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR}}
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=60, temperature=0, response_format=schema
    )
    assert json.loads(answer.choices[0].message.content or "")["colour"] in ("red", "blue")


def test_a_named_tool_is_called_and_answered(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "paint", "parameters": COLOUR}}
    asked = {"model": MODEL, "tools": [tool], "max_tokens": 120, "temperature": 0}
    choice = {"type": "function", "function": {"name": "paint"}}
    message = (
        client.chat.completions.create(messages=MESSAGES, tool_choice=choice, **asked).choices[0].message
    )
    (call,) = message.tool_calls or []
    assert call.function.name == "paint"
    assert json.loads(call.function.arguments)["colour"] in ("red", "blue")
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    turns = [*MESSAGES, message.model_dump(exclude_none=True), result]
    second = client.chat.completions.create(messages=turns, tool_choice="none", **asked)
    assert second.usage is not None and second.usage.completion_tokens > 0


def test_responses_in_one_piece_and_streamed(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "input": "hello", "max_output_tokens": 8, "temperature": 0, "store": False}
    whole = client.responses.create(**asked)
    assert whole.usage is not None and whole.usage.output_tokens == 8
    events = list(client.responses.create(**asked, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    assert events[-1].type in ("response.completed", "response.incomplete")


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert "nobody" in str(caught.value)
