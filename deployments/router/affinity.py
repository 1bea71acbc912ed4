"""One router's history: the replica of each session, and prefixes that replicas cache.

A prefix is a chain of hashes over the JSON value's bytes, unparsed. `hash` is seeded per process, so clients
cannot force collisions.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence

FIRST_BYTES = 256  # block size in the first 4 KiB; later blocks are a sixteenth of what precedes them
MAX_BYTES = 256 << 10  # hashed prefix of a prompt
HEAD_BYTES = 8 << 10  # searched for names, at both ends of a body

# Impossible inside a JSON string, where quotes are escaped.
_PROMPT = re.compile(rb'"(?:messages|prompt|prompt_token_ids|token_ids|input)"\s*:\s*')
_MODEL = re.compile(rb'"model"\s*:\s*"([^"\\]{0,256})"')


def _ends() -> tuple[int, ...]:
    ends = [FIRST_BYTES]
    while ends[-1] < MAX_BYTES:
        ends.append(ends[-1] + max(FIRST_BYTES, ends[-1] // 16))
    return tuple(ends)


BLOCK_ENDS = _ends()  # bytes of the prompt; fewer than 100 blocks


def block_hashes(body: bytes) -> list[int]:
    """Over the model's name and the prompt's bytes up to each block's end."""
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
    """Empty if the name is in the middle of a long body."""
    found = _MODEL.search(body, 0, HEAD_BYTES) or _MODEL.search(body, max(0, len(body) - HEAD_BYTES))
    return b"" if found is None else found[1]


MAX_BLOCKS = 1 << 17  # about 30 MB
MAX_SESSIONS = 1 << 16  # about 20 MB with the longest names
MAX_REPLICAS = 4096


class Affinity:
    def __init__(self, *, max_blocks: int = MAX_BLOCKS, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_blocks = max_blocks
        self._max_sessions = max_sessions
        self._holders: OrderedDict[int, int] = OrderedDict()  # bit mask of replicas, per block and version
        self._bits: dict[str, int] = {}
        self._replicas: list[str] = []
        self._homes: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders) + len(self._homes)

    def home(self, session_id: str | None) -> str | None:
        return None if session_id is None else self._homes.get(session_id)

    def holders(self, blocks: Sequence[int], version: int) -> Iterator[tuple[int, list[str]]]:
        """Cached bytes of a prompt at a version, and their holders; most first."""
        levels: list[int] = []  # masks of the holders of one block, two, ...
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
        if session_id is not None:
            self._homes[session_id] = replica_id
            self._homes.move_to_end(session_id)
            if len(self._homes) > self._max_sessions:
                self._homes.popitem(last=False)
        if blocks:
            bit = self._bit(replica_id)
            # Last block first: vLLM's cache, too, evicts a prompt's end before its beginning.
            for block in reversed(blocks):
                key = hash((block, version))
                self._holders[key] = self._holders.get(key, 0) | bit
                self._holders.move_to_end(key)
            while len(self._holders) > self._max_blocks:
                self._holders.popitem(last=False)

    def _bit(self, replica_id: str) -> int:
        bit = self._bits.get(replica_id)
        if bit is None:
            if len(self._replicas) == MAX_REPLICAS:
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
