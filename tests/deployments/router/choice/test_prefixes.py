"""What two prompts have in common, seen from the bytes of their requests."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.router.choice.prefixes import BLOCK_ENDS, FIRST_BYTES, HEAD_BYTES, MAX_BYTES, block_hashes


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


def test_a_turn_begins_as_the_turn_before() -> None:
    first = chat("a" * 5000)
    second = chat("a" * 5000, "b" * 3000, temperature=0.5)
    assert common(first, second) >= len(block_hashes(first)) - 1, "but for the bytes that end the first list"
    assert len(block_hashes(second)) > len(block_hashes(first))


@pytest.mark.slow
@given(st.integers(0, 3000), st.text("xyz", min_size=600, max_size=3000), st.text("xyz", max_size=3000))
def test_blocks_are_common_as_far_as_the_bytes_are(shared: int, one: str, other: str) -> None:
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
    spaced = json.dumps(body, indent=1).encode()
    assert block_hashes(spaced) == block_hashes(spaced)


def test_models_have_nothing_in_common() -> None:
    base, adapter = (chat("a" * 5000).replace(b'"m"', name) for name in (b'"base"', b'"adapter"'))
    assert common(base, adapter) == 0
    in_front = [b'{"model":"%s","prompt":"%s"}' % (name, b"a" * 5000) for name in (b"base", b"adapter")]
    assert common(*in_front) == 0
    far_behind = [chat("a" * HEAD_BYTES * 4, model=name) for name in ("base", "adapter")]
    assert common(*far_behind) == 0


@pytest.mark.parametrize(
    "body",
    [b"", b"\0", b"not json", b'{"model": "m"}', b"\xff\xfe" * 5000, b'"prompt":', chat("short")],
)
def test_what_has_no_prompt_of_a_block_has_no_blocks(body: bytes) -> None:
    assert block_hashes(body) == []


def test_a_name_inside_of_a_text_is_not_taken_for_the_prompt() -> None:
    quoted = json.dumps({"user": 'he says "messages": ' + "x" * 1000, "n": 1}).encode()
    assert block_hashes(quoted) == []


@given(st.binary(max_size=2000))
def test_anything_may_come(body: bytes) -> None:
    assert len(block_hashes(body)) <= len(BLOCK_ENDS)


def test_the_work_is_bounded() -> None:
    """Bytes behind the limit change nothing: they are not read."""
    text = "a" * (2 * MAX_BYTES)
    hashes = block_hashes(chat(text + "b"))
    assert hashes == block_hashes(chat(text + "c" * 5 * MAX_BYTES))
    assert len(hashes) == len(BLOCK_ENDS) < 100
