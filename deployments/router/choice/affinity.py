"""What one router remembers of where it sent requests: homes of sessions, and prefixes that replicas hold.

A count of our own, not the engines' caches: a replica that was sent a prompt has its KV cache from soon after
on, until its weights change or it needs the place. A version's blocks are not looked at under another one.
What is remembered is bounded; what was used least recently is forgotten first.

The beginning of a prompt is a chain of hashes of the bytes of the JSON value as they were sent, not of the
text that they mean: a client writes the same messages, text or token ids in the same way again, and a body
of megabytes is not parsed. A prompt that is written differently is merely not found. The hashes are Python's
own, with a secret of each process: nobody can make two prompts collide.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence

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


MAX_BLOCKS = 1 << 17  # about 30 MB
MAX_SESSIONS = 1 << 16  # about 20 MB, with names as long as they may be
MAX_REPLICAS = 4096  # that ever were, since the prefixes were last forgotten


class Affinity:
    """The memory of one router.

    Args:
        max_blocks: prefix blocks of all prompts and versions together.
        max_sessions: homes.
    """

    def __init__(self, *, max_blocks: int = MAX_BLOCKS, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_blocks = max_blocks
        self._max_sessions = max_sessions
        self._holders: OrderedDict[int, int] = OrderedDict()  # by block and version; a bit for each replica
        self._bits: dict[str, int] = {}
        self._replicas: list[str] = []  # by the number of their bit
        self._homes: OrderedDict[str, str] = OrderedDict()  # by session

    def __len__(self) -> int:
        """Blocks and sessions that are remembered."""
        return len(self._holders) + len(self._homes)

    def home(self, session_id: str | None) -> str | None:
        """The replica that a session was sent to last."""
        return None if session_id is None else self._homes.get(session_id)

    def holders(self, blocks: Sequence[int], version: int) -> Iterator[tuple[int, list[str]]]:
        """Which replicas have how many bytes of a prompt cached at a version; the most first."""
        levels: list[int] = []  # who has one block, two, ...
        having = -1
        for block in blocks:
            having &= self._holders.get(hash((block, version)), 0)
            if not having:
                break
            levels.append(having)
        seen = 0
        for count in range(len(levels), 0, -1):
            new = levels[count - 1] & ~seen
            if new:
                seen |= new
                yield BLOCK_ENDS[count - 1], [self._replicas[bit] for bit in _bits_of(new)]

    def sent(self, replica_id: str, version: int, *, session_id: str | None, blocks: Sequence[int]) -> None:
        """A request is on its way to a replica.

        Args:
            version: of the replica's weights, as of its routing statistics.
            blocks: of the prompt.
        """
        if session_id is not None:
            self._homes[session_id] = replica_id
            self._homes.move_to_end(session_id)
            if len(self._homes) > self._max_sessions:
                self._homes.popitem(last=False)
        if blocks:
            bit = self._bit(replica_id)
            # The last block first: a prompt's end is forgotten before its beginning, as in vLLM's own cache.
            for block in reversed(blocks):
                key = hash((block, version))
                self._holders[key] = self._holders.get(key, 0) | bit
                self._holders.move_to_end(key)
            while len(self._holders) > self._max_blocks:
                self._holders.popitem(last=False)

    def _bit(self, replica_id: str) -> int:
        bit = self._bits.get(replica_id)
        if bit is None:
            if len(self._replicas) == MAX_REPLICAS:  # most of them are gone
                self._holders.clear()
                self._bits.clear()
                self._replicas.clear()
            bit = self._bits[replica_id] = 1 << len(self._replicas)
            self._replicas.append(replica_id)
        return bit


def _bits_of(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
