"""The beginning of a prompt as a chain of hashes, from the bytes of a request's body: pure, in bounded time.

The bytes of the JSON value are hashed as they were sent, not the text that they mean: a client writes the
same messages, text or token ids in the same way again, and a body of megabytes is not parsed. A prompt that
is written differently is merely not found. The hashes are Python's own, with a secret of each process:
nobody can make two prompts collide, and they mean nothing to another router.
"""

import re

FIRST_BYTES = (
    256  # of a block, and of all blocks of the first 4 KiB; then each is a sixteenth of what is before it
)
MAX_BYTES = 256 << 10  # of a prompt that are hashed
HEAD_BYTES = 8 << 10  # at the body's beginning and at its end, in which names are looked for

# No string of JSON contains these: a quote inside of one has a backslash in front.
_PROMPT = re.compile(rb'"(?:messages|prompt|prompt_token_ids|token_ids|input)"\s*:\s*')
_MODEL = re.compile(rb'"model"\s*:\s*"([^"\\]{0,256})"')


def _ends() -> tuple[int, ...]:
    ends = [FIRST_BYTES]
    while ends[-1] < MAX_BYTES:
        ends.append(ends[-1] + max(FIRST_BYTES, ends[-1] // 16))
    return tuple(ends)


BLOCK_ENDS = _ends()  # in bytes of the prompt; less than a hundred


def block_hashes(body: bytes) -> list[int]:
    """One hash for each block of the prompt, which depends on all bytes up to `BLOCK_ENDS` of it.

    The model's name is hashed before them, since adapters have KV caches of their own.

    Args:
        body: of a request; anything.

    Returns:
        Two lists have a beginning in common as the prompts have, in whole blocks. Empty if no prompt is
        found, or if it is shorter than a block.
    """
    found = _PROMPT.search(body, 0, HEAD_BYTES)
    if found is None:
        return []
    start = found.end()
    hashes = []
    before = hash(_model(body))
    begin = 0
    for end in BLOCK_ENDS:
        if start + end > len(body):
            break
        before = hash((before, body[start + begin : start + end]))
        hashes.append(before)
        begin = end
    return hashes


def _model(body: bytes) -> bytes:
    """The name in the body; empty if it stands in the middle of a long one."""
    found = _MODEL.search(body, 0, HEAD_BYTES) or _MODEL.search(body, max(0, len(body) - HEAD_BYTES))
    return b"" if found is None else found[1]
