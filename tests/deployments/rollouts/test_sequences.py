"""Turns become sequences in which each sampled token is learned from once."""

from array import array

from deployments.rollouts.sequences import TurnTokens, sequences
from trainers.trajectory import parse_trajectories


def turn(
    parent: int,
    prompt: list[int],
    sampled: list[int],
    *,
    constrained: bool = False,
    adapter: str | None = None,
) -> TurnTokens:
    return TurnTokens(
        parent=parent,
        prompt=array("i", prompt),
        sampled=array("i", sampled),
        logprobs=array("f", [-0.5] * len(sampled)),
        weight_versions=[(7, 0, len(sampled))],
        adapter=adapter,
        constrained=constrained,
        finish_reason="stop",
        sampling={},
    )


def test_what_the_model_did_not_produce_is_masked() -> None:
    (made,) = sequences([turn(-1, [1, 2], [3, 4]), turn(0, [5], [6], constrained=True)])
    assert made["prompt_token_ids"] == [1, 2] and made["token_ids"] == [3, 4, 5, 6]
    assert made["loss_mask"] == [True, True, False, True]
    assert made["logprobs"] == [-0.5, -0.5, 0.0, -0.5]
    assert made["constrained"] == [False, False, False, True]
    assert made["weight_versions"] == [
        {"version": 7, "start": 0, "end": 2},
        {"version": 7, "start": 3, "end": 4},
    ]
    assert [(each["turn"], each["start"], each["end"]) for each in made["turns"]] == [(0, 0, 2), (1, 3, 4)]


def test_a_rewritten_history_forks_and_no_token_is_learned_from_twice() -> None:
    first, second, third = sequences(
        [turn(-1, [1], [2]), turn(0, [3], [4]), turn(0, [5], [6]), turn(-1, [1, 9], [7])]
    )
    assert (first["token_ids"], first["loss_mask"]) == ([2, 3, 4], [True, False, True])
    assert (second["token_ids"], second["loss_mask"]) == ([2, 5, 6], [False, False, True])
    assert (third["prompt_token_ids"], third["token_ids"]) == ([1, 9], [7])


def test_a_conversation_with_an_adapter_has_the_adapters_versions() -> None:
    (made,) = sequences([turn(-1, [1], [5], adapter="math@8"), turn(0, [7], [6], adapter="math@9")])
    assert made["weight_versions"] == [
        {"version": 8, "start": 0, "end": 1},
        {"version": 9, "start": 2, "end": 3},
    ]


def test_an_answer_without_a_token_is_no_sequence() -> None:
    assert sequences([turn(-1, [1], [])]) == []


def test_a_trainer_reads_them_as_they_are() -> None:
    made = sequences([turn(-1, [1, 2], [3, 4]), turn(0, [5], [6])])
    entries = [{**each, "advantage": 1.0} for each in made]
    (read,) = parse_trajectories(
        [{name: value for name, value in each.items() if name != "turns"} for each in entries],
        vocabulary_size=10,
        max_length=10,
    )
    assert read.learned_tokens == 3 and read.weight_versions[1].start == 3
