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
        ({"token_ids": [3, "x"]}, "token_ids must hold integers, got 'x'"),
        ({"advantage": float("inf")}, "advantage must be a finite number, got inf"),
        ({"advantage": None}, "wrong type"),
        ({"prompt_token_ids": [1] * 7}, "at most 8 tokens, got 9"),
        ({"weight_versions": [{"version": 1, "start": 0, "end": 3}]}, r"must lie in \[0, 2\]"),
        ({"weight_versions": [{"version": 1}]}, "wrong type"),
    ],
)
def test_a_bad_trajectory_is_refused_by_number(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"trajectory 1: .*{sentence}"):
        parse(GOOD, GOOD | change)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ValueError, match="needs the field 'logprobs'"):
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
