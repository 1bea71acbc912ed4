"""A stream continues on another replica, from its tokens, when its own is lost.

    first replica    tells the router with each event what the engine said (`Said`), in frames
    router           keeps what was said and counts what the client has (`CutStream`)
    second replica   gets the request with what was said. vLLM's output processor takes it for outputs of the
                     engine (`replay`), so the serving code makes the same events again; the engine core
                     continues as after a preemption (`resume`)
    router           drops what the client has

So detokenizer, parsers, stop strings, penalties, grammars, log-probabilities and usage are vLLM's own.
"""

import asyncio
import copy
import json
import sys
import zlib
from array import array
from base64 import b64decode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np

from deployments.protocol.errors import Conflict
from deployments.protocol.rollouts import NOT_CONTINUED

TOKENS = "slipstream_said"  # key in an engine request's extra_args: token ids of the answer so far
MAX_BYTES = 1 << 26  # per answer, about a million tokens; a router keeps them
TURN = 64  # pieces replayed between other requests' turns, 0.1 ms each
_ENCODER = json.JSONEncoder(separators=(",", ":"))  # which json.dumps would make per line


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What vLLM's CompletionOutput had between two events."""

    token_ids: list[int]
    logprobs: list[list[Any]]  # per token: its `Logprob`s' fields, after their token ids
    versions: list[tuple[str, int]]  # all so far, with the index of their first token
    finish_reason: str | None
    stop_reason: int | str | None
    routed: str | None  # routed experts since the piece before, as vLLM's answers have them


class Said:
    """An answer: what the former replica said, and this one."""

    def __init__(self, received: bytes = b"") -> None:
        begin, *self._lines = received.splitlines() or [b"null"]
        self._begin = json.loads(begin)
        self._repeated = len(self._lines)  # outputs that the router knows
        self._news: list[bytes] = []
        self._room = MAX_BYTES - len(received)
        self._continues = True
        # vLLM's own lists, which grow
        self.versions: list[tuple[str, int]] = []
        self._routed: list[Any] = []  # arrays [positions, layers, top_k]
        self._told_routed = 0
        self._missing_routed = 0  # positions whose tokens the router knows, but not experts

    @property
    def repeats(self) -> bool:
        """Whether the next output is a former replica's."""
        return self._repeated > 0

    def pieces(self) -> Iterator[Piece]:
        names = tuple(Piece.__dataclass_fields__)
        for line in self._lines:
            yield Piece(**dict(zip(names, json.loads(line), strict=True)))

    def give_up(self) -> None:
        if self._continues:
            self._continues = False
            self._news = [NOT_CONTINUED]

    def check(self, begin: Sequence[Any]) -> None:
        """Raises Conflict: what is to be continued has another prompt or adapter (`begin_of`)."""
        if self._begin is not None and self._begin[:2] != [*begin[:2]]:
            raise Conflict(
                "the replica that streamed this answer was lost, and another one would continue it with "
                f"another prompt or adapter: expected {self._begin[:2]}, got {[*begin[:2]]}"
            )

    def add(self, output: Any, adapter: str | None, *, with_logprobs: bool) -> None:
        """Tell the router what a RequestOutput has. `with_logprobs`: the client asked for them."""
        if not self._continues:
            return
        if self._repeated:
            self._repeated -= 1
            return
        if self._begin is None:
            self._begin = begin_of(output.prompt_token_ids, adapter, output.num_cached_tokens)
            self._say(self._begin)
        (completion,) = output.outputs
        fields = ("logprob", "rank", "decoded_token") if with_logprobs else ("logprob",)
        logprobs = [
            [[token, *(getattr(each, name) for name in fields)] for token, each in by_token.items()]
            for by_token in completion.logprobs
        ]
        end = completion.finish_reason, completion.stop_reason
        routed = self._new_routed(len(completion.token_ids)) if self._routed else None
        if self._continues:
            self._say([[*completion.token_ids], logprobs, self.versions, *end, routed])

    def _say(self, value: Any) -> None:
        line = _ENCODER.encode(value).encode() + b"\n"
        self._news.append(line)
        self._room -= len(line)
        if self._room < 0:
            self.give_up()

    def _new_routed(self, tokens: int) -> str | None:
        """For the positions before the newest token, where the next replica begins."""
        new, self._told_routed = self._routed[self._told_routed :], len(self._routed)
        self._missing_routed += tokens - sum(map(len, new))
        if self._missing_routed:  # vLLM kept tokens back (`stream_interval`)
            self.give_up()
            return None
        from vllm.utils.serial_utils import numpy2base64

        return numpy2base64(np.concatenate(new)) if new else None

    def news(self) -> bytes:
        """Lines for the router, which precede the next events."""
        news, self._news = self._news, []
        return b"".join(news)

    async def replay(self, processor: Any, request: Any, queue: Any, adapter: str | None) -> bool:
        """Replay what was said before through vLLM's output processor, which has just got the request;
        `queue` then returns an output per piece. Returns whether the engine is needed for the rest. Other
        requests take turns meanwhile: an answer of 16,000 tokens takes seconds.

        Raises:
            Conflict: as `check`.
        """
        from vllm.logprobs import Logprob
        from vllm.v1.engine import EngineCoreOutput, FinishReason

        state = processor.request_states[request.request_id]
        self.versions, self._routed = state.weight_version_starts, state.routed_experts_chunks
        self._missing_routed = len(request.prompt_token_ids) - 1
        if self._begin is None:
            return True
        self.check(begin_of(request.prompt_token_ids, adapter, 0))
        state.num_cached_tokens = self._begin[2]
        said: list[int] = []
        outputs = []
        traces = processor.tracing_enabled
        for number, piece in enumerate(self.pieces(), 1):
            if number % TURN == 0:
                await asyncio.sleep(0)
            said += piece.token_ids
            self.versions[:] = [(version, start) for version, start in piece.versions if start < len(said)]
            logprobs = [
                {token: Logprob(*fields) for token, *fields in position} for position in piece.logprobs
            ]
            state.logprobs_processor.logprobs.extend(logprobs)
            sampled = zip(piece.token_ids, logprobs, strict=True)
            state.logprobs_processor.cumulative_logprob += sum(by[token].logprob for token, by in sampled)
            # The detokenizer finds stop strings itself.
            by_string = piece.finish_reason == "stop" and isinstance(piece.stop_reason, str)
            ended = piece.finish_reason is not None and not by_string
            finish = FinishReason[str(piece.finish_reason).upper()] if ended else None
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=list(piece.token_ids),
                finish_reason=finish,
                stop_reason=piece.stop_reason if ended else None,
                routed_experts=None if piece.routed is None else np.load(BytesIO(b64decode(piece.routed))),
            )
            processor.tracing_enabled = False  # vLLM's span needs the figures of an engine's step
            try:
                processor.process_outputs([output])
            finally:
                processor.tracing_enabled = traces
            if (replayed := queue.get_nowait()) is not None:
                outputs.append(replayed)
        self._told_routed, self._missing_routed = len(self._routed), 0
        state.is_prefilling = True
        # In the queue they would be joined to one output, with other events.
        replays, get_nowait = iter(outputs), queue.get_nowait
        queue.get_nowait = lambda: next(replays, None) or get_nowait()
        if said:
            params = request.sampling_params
            params.extra_args = {**(params.extra_args or {}), TOKENS: said}
        return request.request_id in processor.request_states


def begin_of(prompt: Sequence[int], adapter: str | None, cached: int | None) -> list[Any]:
    """What must be the same on both replicas (the prompt's checksum, the adapter), and how many prompt tokens
    the first had cached."""
    return [zlib.crc32(array("i", prompt).tobytes()), adapter, cached]


def resume(core: Any, request: Any) -> None:
    """Let the engine core continue a new request's answer as after a preemption."""
    said = _said(request.sampling_params)
    if not said:
        return
    request.append_output_token_ids(said)
    # Counted where the answer began. The scheduler asserts that what it counts is in the prompt, but the
    # answer may be in the prefix cache too.
    request.prefill_stats = None
    structured = request.structured_output_request
    if structured is None:
        return
    manager, compiled = core.structured_output_manager, structured._grammar

    def advanced() -> Any:
        ready = copy.copy(request)
        ready.structured_output_request = copy.copy(structured)
        ready.structured_output_request.grammar = compiled.result()
        if not manager.accept_tokens(ready, said):
            raise ValueError(f"the grammar does not allow the {len(said)} tokens that were said")
        structured.reasoning_ended = ready.structured_output_request.reasoning_ended
        return ready.structured_output_request.grammar

    # The pool runs in order: the grammar is compiled before this begins, or being compiled.
    structured.grammar = manager.executor.submit(advanced)


def install() -> None:
    """In a worker: vLLM's first model runner assumes that a new request has no output."""
    if "vllm.v1.worker.worker_base" not in sys.modules:
        return
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    post_init = CachedRequestState.__post_init__
    if post_init.__module__ == __name__:
        return

    def with_output(state: Any) -> None:
        post_init(state)
        if (said := _said(state.sampling_params)) and not state.output_token_ids:
            state.output_token_ids = list(said)
            if state.generator is not None:  # else the rest would repeat the beginning's random numbers
                state.generator.manual_seed((state.generator.initial_seed() + len(said)) % (1 << 63))

    CachedRequestState.__post_init__ = with_output


def _said(params: Any) -> list[int]:
    extra = None if params is None else params.extra_args
    return [] if extra is None else extra.get(TOKENS, [])
