"""What requests weigh."""

from deployments.router.choice.load import LONG_PROMPT_BYTES, load_of


def test_a_sequence_is_one_and_a_long_prompt_is_more() -> None:
    assert load_of(1, b"") == 1
    assert load_of(16, b"x" * (LONG_PROMPT_BYTES - 1)) == 16
    assert load_of(1, b"x" * 3 * LONG_PROMPT_BYTES) == 4


def test_images_do_not_fill_a_replica() -> None:
    assert load_of(1, b"x" * 1000 * LONG_PROMPT_BYTES) < 10
