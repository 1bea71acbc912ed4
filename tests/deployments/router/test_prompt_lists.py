"""Which requests are lists of prompts that may be divided, and what a part of one is."""

import json
from typing import Any

import pytest

from deployments.router.prompt_lists import BATCH_CHAT, COMPLETIONS, prompt_list

CHAT = [{"role": "user", "content": "hello"}]


def of(asked: dict[str, Any], path: str = COMPLETIONS, in_session: bool = False) -> Any:
    return prompt_list("POST", path, asked, in_session=in_session)


@pytest.mark.parametrize("prompts", [["a", "b"], [[1, 2], [3]]])
def test_a_list_of_texts_or_of_token_ids_is_one(prompts: list[Any]) -> None:
    found = of({"prompt": prompts, "n": 3, "stream": True})
    assert [json.loads(each) for each in found.prompts] == prompts
    assert (found.answers, found.streams) == (3, True)


def test_so_is_a_batch_of_chats_which_vllm_does_not_stream() -> None:
    found = of({"messages": [CHAT, CHAT], "n": None, "stream": True}, BATCH_CHAT)
    assert (found.field, found.answers, found.streams) == ("messages", 1, False)


def test_a_part_is_the_same_request_for_some_of_the_prompts() -> None:
    found = of({"prompt": ["a", "b", "c"], "seed": 3, "temperature": 0.5})
    first, second = json.loads(found.part(0, 2)), json.loads(found.part(2, 3))
    assert first.pop("request_id") == second.pop("request_id"), "so their answers have the same id"
    assert first == {"prompt": ["a", "b"], "seed": 3, "temperature": 0.5}
    assert second["prompt"] == ["c"]
    named = of({"prompt": ["a", "b"], "request_id": "mine"})
    assert json.loads(named.part(0, 1))["request_id"] == "mine"


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": "one"},
        {"prompt": ["one"]},
        {"prompt": [1, 2, 3]},  # one prompt
        {"prompt": []},
        {"prompt": ["a", [1]]},
        {"prompt": [[1], []]},
        {"prompt": [[1], [-1]]},
        {"prompt": [[1], [True]]},
        {"prompt": ["a", "b"], "n": "2"},
        {"prompt": ["a", "b"], "n": 0},
        {"prompt": ["a", "b"], "stream": "yes"},
        {"prompt": ["a", "b"], "prompt_embeds": "..."},
        {"prompt": ["a", "b"], "kv_transfer_params": {}},
        {},
    ],
)
def test_what_is_no_list_or_what_vllm_would_refuse_is_left_to_vllm(asked: dict[str, Any]) -> None:
    assert of(asked) is None


def test_a_session_and_other_routes_are_not_divided() -> None:
    asked = {"prompt": ["a", "b"]}
    assert of(asked) is not None
    assert of(asked, in_session=True) is None
    assert of(asked, "/v1/completions/render") is None
    assert prompt_list("GET", COMPLETIONS, asked, in_session=False) is None
    assert of({"messages": CHAT}, BATCH_CHAT) is None, "one conversation, which vLLM refuses"
