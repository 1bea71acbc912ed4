import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.router.affinity import (
    BLOCK_ENDS,
    FIRST_BYTES,
    HEAD_BYTES,
    MAX_BYTES,
    MAX_REPLICAS,
    Affinity,
    block_hashes,
)


def chat(*contents: str, **options: object) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"messages": messages, "model": "m", **options}).encode()


def common(one: bytes, other: bytes) -> int:
    """Blocks at the beginning that are the same."""
    pairs = zip(block_hashes(one), block_hashes(other), strict=False)
    count = 0
    for mine, theirs in pairs:
        if mine != theirs:
            break
        count += 1
    return count


@pytest.mark.slow
@given(st.integers(0, 3000), st.text("xyz", min_size=600, max_size=3000), st.text("xyz", max_size=3000))
def test_blocks_are_shared_as_far_as_the_bytes(shared: int, one: str, other: str) -> None:
    bodies = [chat("p" * shared + each) for each in (one, other)]
    start = bodies[0].index(b'[{"role"')
    texts = [body[start:] for body in bodies]
    same = next((i for i, pair in enumerate(zip(*texts, strict=False)) if pair[0] != pair[1]), 10**9)
    expected = sum(end <= min(same, *map(len, texts)) for end in BLOCK_ENDS)
    # What follows the prompt in the body is hashed too: those blocks may be the same only by being the same.
    assert common(*bodies) >= expected
    assert common(*bodies) <= sum(end <= same for end in BLOCK_ENDS)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "t" * 2000},
        {"prompt": list(range(2000))},
        {"prompt_token_ids": list(range(2000))},
        {"token_ids": list(range(2000)), "sampling_params": {}},
        {"input": "t" * 2000},
        {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "t" * 2000}]},
    ],
    ids=lambda body: next(iter(body)),
)
def test_prompts_are_found_as_text_and_as_token_ids(body: dict[str, object]) -> None:
    assert len(block_hashes(json.dumps(body).encode())) >= 2000 // FIRST_BYTES


def test_models_share_no_blocks() -> None:
    base, adapter = (chat("a" * 5000).replace(b'"m"', name) for name in (b'"base"', b'"adapter"'))
    assert common(base, adapter) == 0
    in_front = [b'{"model":"%s","prompt":"%s"}' % (name, b"a" * 5000) for name in (b"base", b"adapter")]
    assert common(*in_front) == 0
    far_behind = [chat("a" * HEAD_BYTES * 4, model=name) for name in ("base", "adapter")]
    assert common(*far_behind) == 0


@pytest.mark.parametrize(
    "body", [b"", b"\0", b"not json", b'{"model": "m"}', b"\xff\xfe" * 5000, b'"prompt":', chat("short")]
)
def test_body_without_a_block_of_prompt_has_no_hashes(body: bytes) -> None:
    assert block_hashes(body) == []


def test_work_is_bounded() -> None:
    """Bytes behind the limit change nothing: they are not read."""
    text = "a" * (2 * MAX_BYTES)
    hashes = block_hashes(chat(text + "b"))
    assert hashes == block_hashes(chat(text + "c" * 5 * MAX_BYTES))
    assert len(hashes) == len(BLOCK_ENDS) < 100


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


def test_prefixes_of_versions_are_separate() -> None:
    affinity = Affinity()
    send(affinity, "r0", PROMPT, version=1)
    assert held(affinity, PROMPT, version=2) == {}
    send(affinity, "r0", PROMPT[:2], version=2)
    assert held(affinity, PROMPT, version=2) == {"r0": 2}, (
        "the first version's third block is not behind them"
    )


def test_session_has_its_last_replica_as_its_home() -> None:
    affinity = Affinity()
    assert affinity.home("s") is affinity.home(None) is None
    for replica_id in ("r0", "r1"):
        affinity.sent(replica_id, 1, session_id="s", blocks=[])
    assert affinity.home("s") == "r1"


def test_least_recently_used_entries_are_forgotten_first() -> None:
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


@pytest.mark.slow
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
def test_memory_is_bounded_and_says_nothing_that_was_not_sent(
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
