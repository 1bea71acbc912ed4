import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.router.prompt_lists import Share, merge_responses, parse_object, prompt_list, split_prompts


def of(asked: dict[str, Any]) -> Any:
    return prompt_list("POST", "/v1/completions", parse_object(json.dumps(asked).encode()))


@pytest.mark.parametrize("prompts", [["a", "b"], [[1, 2], [3]]])
def test_list_of_texts_or_token_ids_can_be_split(prompts: list[Any]) -> None:
    found = of({"prompt": prompts, "n": 3, "stream": False})
    assert [json.loads(each) for each in found.prompts] == prompts
    assert found.completions == 3


def test_part_is_the_same_request_for_some_of_the_prompts() -> None:
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
        {"prompt": ["a", "b"], "stream": True},
        {"prompt": ["a", "b"], "prompt_embeds": "..."},
        {"prompt": ["a", "b"], "kv_transfer_params": {}},
        {},
    ],
)
def test_other_and_invalid_prompts_are_not_split(asked: dict[str, Any]) -> None:
    assert of(asked) is None


def sizes(prompts: int, answers: int, loads: dict[str, int]) -> dict[str, int]:
    return {share.replica_id: share.stop - share.start for share in split_prompts(prompts, answers, loads)}


def test_idle_replicas_get_the_same() -> None:
    assert split_prompts(9, 1, {"a": 0, "b": 0}) == [
        Share(replica_id="a", start=0, stop=5),
        Share(replica_id="b", start=5, stop=9),
    ]
    assert sizes(64, 8, {"a": 0, "b": 0, "c": 0, "d": 0}) == {"a": 16, "b": 16, "c": 16, "d": 16}


def test_busy_replica_gets_less_and_a_very_busy_one_nothing() -> None:
    assert sizes(100, 1, {"a": 0, "b": 40}) == {"a": 70, "b": 30}
    assert sizes(100, 1, {"a": 0, "b": 10, "c": 500}) == {"a": 55, "b": 45}
    assert sizes(100, 2, {"a": 0, "b": 40}) == {"a": 60, "b": 40}
    assert sizes(8, 1, {"a": 0, "b": 50}) == {}


def test_answers_to_a_prompt_stay_together() -> None:
    assert sizes(1, 64, {"a": 0, "b": 0}) == {}
    assert sizes(2, 64, {"a": 0, "b": 0, "c": 0}) == {"a": 1, "b": 1}
    assert sizes(3, 64, {"a": 0, "b": 0}) in ({"a": 2, "b": 1}, {"a": 1, "b": 2})


@pytest.mark.slow
@given(
    prompts=st.integers(1, 300),
    answers=st.integers(1, 16),
    loads=st.dictionaries(st.text("abcdefgh", min_size=1, max_size=2), st.integers(0, 400), max_size=8),
)
def test_shares_cover_the_list_and_level_the_loads(prompts: int, answers: int, loads: dict[str, int]) -> None:
    shares = split_prompts(prompts, answers, loads)
    if not shares:
        return
    assert [share.start for share in shares] == [0, *[share.stop for share in shares[:-1]]]
    assert shares[-1].stop == prompts
    assert len({share.replica_id for share in shares}) == len(shares) >= 2
    assert all(share.stop > share.start for share in shares)
    after = [loads[share.replica_id] + (share.stop - share.start) * answers for share in shares]
    assert max(after) - min(after) <= 2 * answers, "level, but for a prompt more or less"
    spared = [loads[name] for name in loads if name not in {share.replica_id for share in shares}]
    assert all(load >= max(loads[share.replica_id] for share in shares) for load in spared)


def lines(choices: list[Any], **rest: Any) -> bytes:
    """The answer of a part as a replica gives it."""
    return json.dumps(rest).encode() + b"\n" + json.dumps(choices).encode()[1:-1]


def test_choices_are_joined_and_usage_is_summed() -> None:
    first = {"prompt_tokens": 3, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}}
    second = {"prompt_tokens": 4, "total_tokens": 9, "prompt_tokens_details": None}
    whole = json.loads(
        merge_responses(
            [
                lines([{"index": 0}, {"index": 1}], id="x", usage=first, weight_version=8, metrics={"a": 1}),
                lines([{"index": 2}], id="x", usage=second, weight_version=7, metrics=None),
            ]
        )
    )
    assert whole == {
        "id": "x",
        "choices": [{"index": 0}, {"index": 1}, {"index": 2}],
        "usage": {"prompt_tokens": 7, "total_tokens": 14, "prompt_tokens_details": {"cached_tokens": 1}},
        "weight_version": 7,
        "metrics": None,
    }
