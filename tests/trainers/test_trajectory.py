import json
from dataclasses import asdict

import pytest

from trainers.trajectory import Trajectory, VersionSpan, parse_trajectories

GOOD = {
    "prompt_token_ids": [1, 2],
    "token_ids": [3, 4],
    "logprobs": [-0.5, -1],
    "advantage": 1,
    "weight_versions": [{"version": 7, "start": 0, "end": 2}],
}


def parse(*entries: object) -> list[Trajectory]:
    return parse_trajectories(list(entries), vocabulary_size=10, max_length=8)


def test_a_trajectory_is_read_from_json() -> None:
    (read,) = parse(GOOD)
    assert read == Trajectory(
        prompt_token_ids=(1, 2),
        token_ids=(3, 4),
        logprobs=(-0.5, -1.0),
        advantage=1.0,
        weight_versions=(VersionSpan(version=7, start=0, end=2),),
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"logprobs": [-0.5]}, "logprobs must have 2 entries, one for each token id, got 1"),
        ({"logprobs": [-0.5, float("nan")]}, "logprobs must be finite"),
        ({"logprobs": [-0.5, 0.5]}, "must not be above 0, got 0.5"),
        ({"token_ids": [], "logprobs": []}, "token_ids must not be empty"),
        ({"prompt_token_ids": []}, "prompt_token_ids must not be empty"),
        ({"token_ids": [3, 10]}, r"token ids must lie in \[0, 10\), got 10"),
        ({"token_ids": [3, "x"]}, "token_ids.1: Input should be a valid integer, got x"),
        ({"advantage": float("inf")}, "advantage must be a finite number, got inf"),
        ({"advantage": None}, "advantage.float: Input should be a valid number, got None"),
        ({"prompt_token_ids": [1] * 7}, "at most 8 tokens, got 9"),
        ({"weight_versions": [{"version": 1, "start": 0, "end": 3}]}, r"must lie in \[0, 2\]"),
        ({"weight_versions": [{"version": 1}]}, "weight_versions.0.start: Field required"),
        ({"loss_mask": [True]}, "loss_mask must have 2 entries, one for each token id, got 1"),
        ({"loss_mask": [True, 2]}, "loss_mask.1: Input should be a valid boolean"),
        ({"loss_mask": 1}, "loss_mask: Input should be a valid tuple, got 1"),
        ({"constrained": [True]}, "constrained must have 2 entries, one for each token id, got 1"),
        ({"logprobs": [-0.5, None]}, "logprobs.1: Input should be a valid number, got None"),
        ({"logprobs": [0.5, 0.0], "loss_mask": [True, False]}, "must not be above 0, got 0.5"),
        ({"advantage": [1.0]}, "advantage must have 2 entries, one for each token id, got 1"),
        ({"advantage": [1.0, float("nan")]}, "advantage must be a finite number, got nan"),
        ({"advantage": [1.0, "x"]}, "advantage.*1: Input should be a valid number, got x"),
        ({"advantage": "1.0"}, "advantage.*: Input should be a valid number, got 1.0"),
    ],
)
def test_a_bad_trajectory_is_refused_by_number(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"trajectory 1: .*{sentence}"):
        parse(GOOD, GOOD | change)


def test_masks_and_advantages_of_each_token_are_read() -> None:
    (read,) = parse(GOOD | {"loss_mask": [False, True], "advantage": [0, 0.5], "logprobs": [7.0, -1.0]})
    assert read.loss_mask == (False, True) and read.advantage == (0.0, 0.5)
    assert read.learned_tokens == 1 and parse(GOOD)[0].learned_tokens == 2


def test_a_completion_may_be_masked_whole_and_a_batch_may_not() -> None:
    masked = GOOD | {"loss_mask": [False, False]}
    assert [read.learned_tokens for read in parse(masked, GOOD)] == [0, 2]
    with pytest.raises(ValueError, match="none of 2 trajectories has a token whose loss_mask is true"):
        parse(masked, masked)


def test_a_completion_to_imitate_needs_tokens_alone() -> None:
    def imitated(entry: dict[str, object]) -> Trajectory:
        (read,) = parse_trajectories([entry], vocabulary_size=10, max_length=8, sampled=False)
        return read

    bare = {name: GOOD[name] for name in ("prompt_token_ids", "token_ids")}
    assert (imitated(bare).logprobs, imitated(bare).advantage) == ((0.0, 0.0), 0.0)
    assert imitated(GOOD) == parse(GOOD)[0]
    with pytest.raises(ValueError, match="token_ids: Input should be a valid tuple, got 3"):
        imitated(bare | {"token_ids": 3})
    with pytest.raises(ValueError, match="token_ids: Field required"):
        imitated({"prompt_token_ids": [1]})


def test_a_trajectory_written_as_json_is_read_again() -> None:
    (read,) = parse(GOOD | {"loss_mask": [False, True], "advantage": [0, 0.5], "constrained": [True, False]})
    assert read.constrained == (True, False)
    assert parse(json.loads(json.dumps(asdict(read)))) == [read]
    assert parse(json.loads(json.dumps(asdict(parse(GOOD)[0])))) == parse(GOOD)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ValueError, match="logprobs: Field required"):
        parse({name: value for name, value in GOOD.items() if name != "logprobs"})


def test_every_problem_is_counted_and_the_first_are_named() -> None:
    with pytest.raises(ValueError, match=r"trajectory 0.*trajectory 2: .*; and 7 more"):
        parse(*[GOOD | {"advantage": float("nan")}] * 10)


@pytest.mark.parametrize("entries", [None, {}, "abc", 3])
def test_anything_but_a_list_is_refused(entries: object) -> None:
    with pytest.raises(ValueError, match="non-empty list"):
        parse_trajectories(entries, vocabulary_size=10, max_length=8)
    with pytest.raises(ValueError, match="an empty list"):
        parse()
