"""What a router remembers, and that this is bounded."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from deployments.router.choice.affinity import MAX_REPLICAS, Affinity
from deployments.router.choice.prefixes import BLOCK_ENDS

PROMPT = [101, 102, 103, 104]


def held(affinity: Affinity, blocks: list[int], version: int = 1) -> dict[str, int]:
    """Blocks by replica."""
    found = affinity.holders(blocks, version)
    return {name: BLOCK_ENDS.index(size) + 1 for size, names in found for name in names}


def send(affinity: Affinity, replica_id: str, blocks: list[int], version: int = 1) -> None:
    affinity.sent(replica_id, version, session_id=None, blocks=blocks)


def test_each_replica_has_the_longest_beginning_that_it_was_sent() -> None:
    affinity = Affinity()
    send(affinity, "long", PROMPT)
    send(affinity, "short", PROMPT[:2])
    send(affinity, "other", [1, *PROMPT[1:]])
    assert held(affinity, PROMPT) == {"long": 4, "short": 2}
    assert held(affinity, [*PROMPT, 105]) == {"long": 4, "short": 2}
    assert held(affinity, PROMPT[:1]) == {"long": 1, "short": 1}
    assert held(affinity, [9]) == held(affinity, []) == {}


def test_the_longest_come_first() -> None:
    affinity = Affinity()
    for number in (2, 4, 1, 3):
        send(affinity, f"r{number}", PROMPT[:number])
    assert list(affinity.holders(PROMPT, 1)) == [(BLOCK_ENDS[n - 1], [f"r{n}"]) for n in (4, 3, 2, 1)]


def test_versions_do_not_mix() -> None:
    affinity = Affinity()
    send(affinity, "r0", PROMPT, version=1)
    assert held(affinity, PROMPT, version=2) == {}
    send(affinity, "r0", PROMPT[:2], version=2)
    assert held(affinity, PROMPT, version=2) == {"r0": 2}, (
        "the first version's third block is not behind them"
    )


def test_a_session_has_its_last_replica_as_its_home() -> None:
    affinity = Affinity()
    assert affinity.home("s") is affinity.home(None) is None
    for replica_id in ("r0", "r1"):
        affinity.sent(replica_id, 1, session_id="s", blocks=[])
    assert affinity.home("s") == "r1"


def test_what_was_used_least_recently_is_forgotten_first() -> None:
    affinity = Affinity(max_blocks=6, max_sessions=2)
    send(affinity, "r0", [1, 2, 3])
    send(affinity, "r1", [4, 5])
    send(affinity, "r0", [1, 2, 3])
    send(affinity, "r2", [6, 7])
    assert held(affinity, [4, 5]) == {"r1": 1}, "the end of a prompt before its beginning"
    assert held(affinity, [1, 2, 3]) == {"r0": 3}
    for session in ("a", "b", "a", "c"):
        affinity.sent("r0", 1, session_id=session, blocks=[])
    assert [affinity.home(session) for session in "abc"] == ["r0", None, "r0"]


def test_replicas_that_come_and_go_leave_nothing_for_ever() -> None:
    affinity = Affinity()
    for number in range(MAX_REPLICAS + 1):
        send(affinity, f"r{number}", PROMPT)
    assert held(affinity, PROMPT) == {f"r{MAX_REPLICAS}": 4}


@given(
    st.lists(
        st.tuples(
            st.integers(0, 4),
            st.integers(0, 2),
            st.none() | st.integers(0, 9),
            st.lists(st.integers(0, 9), max_size=5),
        )
    )
)
def test_the_memory_is_bounded_and_says_nothing_that_was_not_sent(
    requests: list[tuple[int, int, int | None, list[int]]],
) -> None:
    affinity = Affinity(max_blocks=7, max_sessions=3)
    sent: Counter[tuple[str, int, int]] = Counter()
    for replica, version, session, blocks in requests:
        name = f"r{replica}"
        affinity.sent(name, version, session_id=None if session is None else str(session), blocks=blocks)
        sent.update((name, version, block) for block in blocks)
        assert len(affinity) <= 7 + 3
        for at in range(3):
            for replica_id, count in held(affinity, blocks, at).items():
                assert all(sent[replica_id, at, block] for block in blocks[:count])
