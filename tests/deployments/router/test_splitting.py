"""How lists of prompts are divided."""

from hypothesis import given
from hypothesis import strategies as st

from deployments.router.splitting import MIN_SEQUENCES, Share, split_prompts


def sizes(prompts: int, answers: int, loads: dict[str, int]) -> dict[str, int]:
    return {share.replica_id: share.stop - share.start for share in split_prompts(prompts, answers, loads)}


def test_idle_replicas_get_the_same() -> None:
    assert split_prompts(9, 1, {"a": 0, "b": 0}) == [
        Share(replica_id="a", start=0, stop=5),
        Share(replica_id="b", start=5, stop=9),
    ]
    assert sizes(64, 8, {"a": 0, "b": 0, "c": 0, "d": 0}) == {"a": 16, "b": 16, "c": 16, "d": 16}


def test_a_busy_replica_gets_less_and_a_very_busy_one_nothing() -> None:
    assert sizes(100, 1, {"a": 0, "b": 40}) == {"a": 70, "b": 30}
    assert sizes(100, 1, {"a": 0, "b": 10, "c": 500}) == {"a": 55, "b": 45}
    assert sizes(100, 2, {"a": 0, "b": 40}) == {"a": 60, "b": 40}
    assert sizes(8, 1, {"a": 0, "b": 50}) == {}


def test_small_lists_stay_together() -> None:
    assert sizes(2 * MIN_SEQUENCES - 1, 1, {"a": 0, "b": 0}) == {}
    assert sizes(2 * MIN_SEQUENCES, 1, {"a": 0, "b": 0}) == {"a": MIN_SEQUENCES, "b": MIN_SEQUENCES}
    # Ten sequences are worth two replicas, not four.
    assert len(sizes(10, 1, {"a": 0, "b": 0, "c": 0, "d": 0})) == 2


def test_the_answers_to_a_prompt_stay_together() -> None:
    assert sizes(1, 64, {"a": 0, "b": 0}) == {}
    assert sizes(2, 64, {"a": 0, "b": 0, "c": 0}) == {"a": 1, "b": 1}
    assert sizes(3, 64, {"a": 0, "b": 0}) in ({"a": 2, "b": 1}, {"a": 1, "b": 2})


def test_one_replica_or_none_gets_it_whole() -> None:
    assert split_prompts(100, 1, {"a": 0}) == [] == split_prompts(100, 1, {})


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
