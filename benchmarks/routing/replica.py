"""A model of one vLLM engine: continuous batching, chunked prefill, a prefix cache, preemption.

Steps in which every sequence decodes and none begins are one event. A step takes

    step_s + sequence_s * sequences + context_s * tokens in the KV cache + prefill_s * tokens prefilled
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

BLOCK = 128  # tokens; vLLM's have 16
Block = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The defaults are an 8B model in bfloat16 on one H100.

    16 GB of weights, and 128 KiB of KV cache for a token, are read at 2.7 TB/s; prefill has half of the peak.
    """

    step_s: float = 6e-3
    sequence_s: float = 2e-5
    context_s: float = 4.8e-8
    prefill_s: float = 3.3e-5
    chunk: int = 8192  # tokens that are prefilled in a step
    places: int = 256
    kv_tokens: int = 400_000


@dataclass(slots=True, kw_only=True, eq=False)
class Running:
    """A request in an engine.

    Attributes:
        blocks: names of all whole blocks of prompt and output.
        unfilled: tokens whose KV cache is to be computed before the next token comes.
    """

    blocks: Sequence[Block]
    prompt: int
    output: int
    payload: object
    done: int = 0
    unfilled: int = 0
    pinned: int = 0  # blocks

    @property
    def tokens(self) -> int:
        return self.prompt + self.done


@dataclass(slots=True, kw_only=True)
class Replica:
    """One engine. `plan` says when the next event ends, and `step` ends it."""

    engine: Engine
    running: list[Running] = field(default_factory=list)
    waiting: deque[Running] = field(default_factory=deque)
    queried: int = 0  # tokens of prompts
    hits: int = 0
    _free: "OrderedDict[Block, None]" = field(default_factory=OrderedDict)  # cached, and not in use
    _pinned: dict[Block, int] = field(default_factory=dict)  # in use, by how many
    _tokens: int = 0  # of all that run
    _unfilled: int = 0
    _unshared: int = 0  # tokens in blocks that are not pinned
    _steps: int = 0  # of the planned event
    _began: float = 0.0
    _first_s: float = 0.0  # of its first step
    _growth_s: float = 0.0  # how much longer each next one is
    _prefilled: int = 0

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    def change_weights(self) -> None:
        """No block of the old ones is used again, but by what is running."""
        for each in self.running:
            self._unpin(each)
            each.blocks = ()
        self._free.clear()

    def plan(self, now: float) -> float | None:
        """When the next event ends; None: there is nothing to do."""
        self._admit()
        if not self.running:
            return None
        engine = self.engine
        filling = [each for each in self.running if each.unfilled]
        decoding = len(self.running) - len(filling)
        self._prefilled = min(engine.chunk, self._unfilled)
        self._began = now
        self._first_s = (
            engine.step_s
            + engine.sequence_s * decoding
            + engine.context_s * (self._tokens - self._unfilled)
            + engine.prefill_s * self._prefilled
        )
        self._growth_s = engine.context_s * decoding
        self._steps = 1 if filling else min(each.output - each.done for each in self.running)
        return now + self._lasts(self._steps)

    def interrupt(self, now: float) -> float:
        """A request came: the event ends with the step that is under way. When that is."""
        low, high = 1, self._steps
        while low < high:
            middle = (low + high) // 2
            if self._began + self._lasts(middle) >= now:
                high = middle
            else:
                low = middle + 1
        self._steps = low
        return self._began + self._lasts(low)

    def step(self) -> list[Running]:
        """The event has ended: the sequences that end with it."""
        left = self._prefilled
        for each in self.running:
            made = self._steps
            if each.unfilled:
                part = min(left, each.unfilled)
                each.unfilled -= part
                left -= part
                made = int(each.unfilled == 0)  # the last step of a prefill makes a token
            each.done += made
            self._tokens += made
            self._unshared += made
        self._unfilled -= self._prefilled
        ended = [each for each in self.running if each.done >= each.output]
        if ended:
            self.running = [each for each in self.running if each.done < each.output]
        for each in ended:
            self._leave(each)
            for block in reversed(each.blocks):
                self._free[block] = None
                self._free.move_to_end(block)
        while self._used > self.engine.kv_tokens and len(self.running) > 1:
            last = self.running.pop()
            self._leave(last)
            self.waiting.appendleft(last)
        self._evict()
        return ended

    def _lasts(self, steps: int) -> float:
        return steps * self._first_s + self._growth_s * steps * (steps - 1) / 2

    @property
    def _used(self) -> int:
        """Tokens of the KV cache that running sequences have; a shared block counts once."""
        return len(self._pinned) * BLOCK + self._unshared

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.engine.places:
            first = self.waiting[0]
            cached = self._cached(first)
            if self.running and self._used + first.tokens - cached > 0.97 * self.engine.kv_tokens:
                break
            self.waiting.popleft()
            if not first.done:
                self.queried += first.prompt
                self.hits += cached
            first.unfilled = max(1, first.tokens - cached)
            self._unfilled += first.unfilled
            self._tokens += first.tokens
            self._unshared += first.tokens
            self._pin(first)
            self.running.append(first)
        self._evict()

    def _leave(self, sequence: Running) -> None:
        self._unpin(sequence)
        self._tokens -= sequence.tokens
        self._unshared -= sequence.tokens
        self._unfilled -= sequence.unfilled

    def _evict(self) -> None:
        room = max(0, (self.engine.kv_tokens - self._used) // BLOCK)
        while len(self._free) > room:
            self._free.popitem(last=False)

    def _cached(self, sequence: Running) -> int:
        """Tokens of the prompt that have not to be computed."""
        count = 0
        for block in sequence.blocks[: sequence.prompt // BLOCK]:
            if block not in self._pinned and block not in self._free:
                break
            count += 1
        return count * BLOCK

    def _pin(self, sequence: Running) -> None:
        blocks = sequence.blocks[: sequence.prompt // BLOCK]
        sequence.pinned = len(blocks)
        self._unshared -= len(blocks) * BLOCK
        for block in blocks:
            self._pinned[block] = self._pinned.get(block, 0) + 1
            self._free.pop(block, None)

    def _unpin(self, sequence: Running) -> None:
        for block in reversed(sequence.blocks[: sequence.pinned]):
            count = self._pinned[block] - 1
            if count:
                self._pinned[block] = count
            else:
                del self._pinned[block]
                self._free[block] = None
        self._unshared += sequence.pinned * BLOCK
        sequence.pinned = 0
