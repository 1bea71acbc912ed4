import json
import struct
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from safetensors.numpy import load, save

from trainers.trajectory import RoutedExperts, Trajectory, VersionSpan, parse_trajectories
from trainers.trajectory_arrays import from_bytes, settings_of, to_bytes

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
        (
            {"weight_versions": [{"version": 1 << 63, "start": 0, "end": 1}]},
            r"less than 2 \*\* 63, got 9223372",
        ),
        ({"weight_versions": [{"version": -1, "start": 0, "end": 1}]}, "version must be 0 or more, .*got -1"),
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


def test_every_problem_is_counted_and_the_first_are_named() -> None:
    with pytest.raises(ValueError, match=r"trajectory 0.*trajectory 2: .*; and 7 more"):
        parse(*[GOOD | {"advantage": float("nan")}] * 10)


# -- batches as arrays say what the same batches say as objects ------------------------------------


FLOATS = some.floats(-100, 0, width=32)


@some.composite
def trajectories(draw: some.DrawFn) -> Trajectory:
    length = draw(some.integers(1, 5))
    tokens = some.integers(0, 2**31 - 1)
    exactly = {"min_size": length, "max_size": length}
    spans = some.builds(
        VersionSpan, version=some.integers(0, 2**40), start=some.integers(0, 9), end=some.integers(0, 9)
    )
    return Trajectory(
        prompt_token_ids=tuple(draw(some.lists(tokens, max_size=4))),
        token_ids=tuple(draw(some.lists(tokens, **exactly))),
        logprobs=tuple(draw(some.lists(FLOATS, **exactly))),
        advantage=draw(FLOATS | some.lists(FLOATS, **exactly).map(tuple)),
        loss_mask=draw(some.none() | some.lists(some.booleans(), **exactly).map(tuple)),
        constrained=draw(some.none() | some.lists(some.booleans(), **exactly).map(tuple)),
        weight_versions=tuple(draw(some.lists(spans, max_size=2))),
    )


def spelled_out(trajectory: Trajectory) -> dict[str, Any]:
    count, advantage, mask = len(trajectory.token_ids), trajectory.advantage, trajectory.loss_mask
    return {
        "prompt": trajectory.prompt_token_ids,
        "answer": trajectory.token_ids,
        "logprobs": trajectory.logprobs,
        "advantages": advantage if isinstance(advantage, tuple) else (advantage,) * count,
        "mask": (True,) * count if mask is None else mask,
        "constrained": (False,) * count if trajectory.constrained is None else trajectory.constrained,
        "spans": trajectory.weight_versions,
    }


@pytest.mark.slow
@given(some.lists(trajectories(), max_size=5))
@settings(deadline=None)
def test_what_was_written_is_read(batch: list[Trajectory]) -> None:
    read = from_bytes(to_bytes(batch))
    assert list(map(spelled_out, read)) == list(map(spelled_out, batch))


ONE = Trajectory(
    prompt_token_ids=(1, 2), token_ids=(3, 4, 5), logprobs=(-0.5, -1.0, -2.0), advantage=0.5, loss_mask=None
)
OTHER = Trajectory(prompt_token_ids=(6,), token_ids=(7,), logprobs=(-0.25,), advantage=-0.5)


def test_a_batch_without_masks_and_lists_is_read_as_it_was() -> None:
    assert from_bytes(to_bytes([ONE, OTHER])) == [ONE, OTHER]
    assert parse_trajectories(from_bytes(to_bytes([ONE, OTHER])), vocabulary_size=8, max_length=8) == [
        ONE,
        OTHER,
    ]


def test_routed_experts_are_read_as_they_were_written() -> None:
    experts = [
        RoutedExperts(layers=2, top_k=1, dtype="uint16", ids=bytes(range(4 * positions)))
        for positions in (4, 1)
    ]
    batch = [replace(each, routed_experts=ids) for each, ids in zip((ONE, OTHER), experts, strict=True)]
    assert from_bytes(to_bytes(batch)) == batch
    assert parse({**GOOD, "routed_experts": {**asdict(experts[1]), "ids": "AAECAwABAgMAAQID"}})
    with pytest.raises(ValueError, match=r"3 \* 4 bytes of ids, for each position .*, got 4"):
        parse({**GOOD, "routed_experts": {**asdict(experts[1]), "ids": "AAECAw=="}})
    assert from_bytes(to_bytes([batch[0], OTHER])) == [ONE, OTHER], "or a run could not go on"
    arrays = load(to_bytes(batch))
    with pytest.raises(ValueError, match="routed_experts: expected 5 positions, got 4"):
        from_bytes(save(arrays | {"routed_experts": arrays["routed_experts"][:4]}))
    with pytest.raises(ValueError, match="expected uint8 or uint16, got int64"):
        from_bytes(save(arrays | {"routed_experts": arrays["routed_experts"].astype(np.int64)}))


def test_single_trajectories_are_checked_like_any_others() -> None:
    with pytest.raises(ValueError, match=r"trajectory 1: token ids must lie in \[0, 7\), got 7"):
        parse_trajectories(from_bytes(to_bytes([ONE, OTHER])), vocabulary_size=7, max_length=8)
    with pytest.raises(ValueError, match="non-empty list"):
        parse_trajectories(from_bytes(to_bytes([])), vocabulary_size=7, max_length=8)


def test_answers_that_are_imitated_need_no_log_probabilities() -> None:
    arrays = load(to_bytes([ONE, OTHER]))
    del arrays["logprobs"], arrays["advantages"]
    read = from_bytes(save(arrays), sampled=False)
    assert [each.token_ids for each in read] == [ONE.token_ids, OTHER.token_ids]
    assert read[0].logprobs == (0.0,) * 3
    with pytest.raises(ValueError, match="expected the array 'logprobs'"):
        from_bytes(save(arrays))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lengths": None}, r"expected the array 'lengths', got \['advantages', 'logprobs'"),
        ({"rewards": np.zeros(2)}, "expected no other arrays than .*, got 'rewards'"),
        ({"token_ids": np.zeros(4)}, "token_ids: expected integers, got float64"),
        ({"logprobs": np.zeros(4, int)}, "logprobs: expected floats, got int64"),
        ({"token_ids": np.zeros((2, 2), int)}, r"token_ids: expected one dimension, got \[2, 2\]"),
        ({"weight_versions": np.zeros((2, 3), int)}, r"weight_versions: expected \[rows, 4\], got \[2, 3\]"),
        ({"weight_versions": np.array([[2, 1, 0, 1]])}, r"trajectories in \[0, 2\), got 2"),
        ({"token_ids": np.zeros(5, int)}, r"token_ids: expected \[4\], got \[5\]"),
        ({"logprobs": np.zeros(3)}, r"logprobs: expected \[4\], got \[3\]"),
        ({"loss_mask": np.zeros(3, bool)}, r"loss_mask: expected \[4\], got \[3\]"),
        ({"advantages": np.zeros(3)}, r"advantages: expected \[2\] or \[4\], got \[3\]"),
        ({"prompt_lengths": np.array([3])}, r"prompt_lengths: expected \[2\], got \[1\]"),
        ({"prompt_lengths": np.array([4, -1])}, "prompt_lengths: expected lengths, got -1"),
        ({"lengths": np.array([5, -1])}, "lengths: expected lengths, got -1"),
        (
            {"lengths": np.array([2**63 - 1, 2**63 - 1])},
            r"token_ids: expected \[18446744073709551614\], got \[4\]",
        ),
        ({"lengths": np.array([2**31 - 1, 1], np.int32)}, r"token_ids: expected \[2147483648\], got \[4\]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, Any], sentence: str) -> None:
    arrays = load(to_bytes([ONE, OTHER])) | changes
    with pytest.raises(ValueError, match=sentence):
        from_bytes(save({name: each for name, each in arrays.items() if each is not None}))


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3"])
def test_numbers_that_numpy_does_not_have_are_refused(dtype: str) -> None:
    described = {"lengths": {"dtype": dtype, "shape": [2], "data_offsets": [0, 4 if dtype == "BF16" else 2]}}
    header = json.dumps(described).encode()
    with pytest.raises(ValueError, match=f"that numpy has, got '{dtype}'"):
        from_bytes(struct.pack("<Q", len(header)) + header + b"\0" * described["lengths"]["data_offsets"][1])


@given(some.binary(max_size=200))
def test_any_bytes_are_an_error_of_one_kind(content: bytes) -> None:
    with pytest.raises(ValueError, match="expected"):
        from_bytes(content)


def test_settings_travel_beside_the_arrays() -> None:
    batch = [Trajectory(prompt_token_ids=(1,), token_ids=(2,), logprobs=(-1.0,), advantage=0.5)]
    sent = to_bytes(batch, '{"learning_rate": 0.5}')
    assert from_bytes(sent) == batch
    assert settings_of(sent) == '{"learning_rate": 0.5}'
    assert settings_of(to_bytes(batch)) is None
    for garbage in (b"", b"x" * 20, (2).to_bytes(8, "little") + b"[]"):
        with pytest.raises(ValueError, match="in the safetensors format"):
            settings_of(garbage)
