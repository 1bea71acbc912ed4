"""Captures an engine's answers to a rollout's request, below every HTTP route.

The front puts a `Capture` beside the request's spans; `RecordingLLM` passes each engine call through it. The
controller opens the rollouts while the engine begins, and has a turn before the client has its last token: a
reward never comes first.
"""

import asyncio
import copy
import uuid
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from hashlib import sha256
from typing import Any

from deployments.protocol.errors import InvalidRequest, SlipstreamError
from deployments.protocol.rollouts import CapturedImage, CapturedTurn, RolloutRequest
from deployments.replica import image_files
from deployments.replica.continuation import Said
from trainers.trajectory import RoutedExperts

Ledger = Callable[..., Awaitable[None]]  # takes the name of a method of the `RolloutStore`, and its arguments
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


class Capture:
    """The turns of one HTTP request. Make it in an event loop.

    Attributes:
        said: what the router is told for a continuation; None: the stream cannot be continued.
        failure: why a turn could not be recorded; the client gets this error.
    """

    def __init__(self, turn: RolloutRequest, ledger: Ledger, said: Said | None = None) -> None:
        self._turn = turn
        self.said = said
        self._ledger = ledger
        image_files.install()
        self._opening = asyncio.ensure_future(ledger("open", turn))
        self._opening.add_done_callback(lambda done: done.cancelled() or done.exception())  # is retrieved
        self.failure: SlipstreamError | None = None
        self._ids = 0

    def close(self) -> None:
        self._opening.cancel()

    async def opened(self) -> None:
        """Raises SlipstreamError: a rollout refuses a turn of this request."""
        try:
            await self._opening
        except SlipstreamError as error:
            self.failure = error
            raise

    def next_id(self) -> str:
        """Not random, for events: every replica makes the same ones for a request."""
        self._ids += 1
        return uuid.uuid5(
            uuid.NAMESPACE_OID, f"{self._turn.rollout_ids[0]}/{self._turn.request}/{self._ids}"
        ).hex[:16]

    def sampling(self, params: Any) -> Any:
        changed = copy.copy(params)
        changed.routed_experts_prompt_start = 0
        if params.num_logprobs is None:
            changed.logprobs = 0
        return changed

    async def taken(
        self,
        stream: AsyncGenerator[Any, None],
        prompt: Any,
        asked: Any,
        first_choice: int | None,
        adapter: Callable[[], str | None],
    ) -> AsyncGenerator[Any, None]:
        """The same outputs as without capture; a turn is recorded before its last output passes.

        Args:
            prompt: as the engine gets it. Outputs have a token id for each embedding or part of an image too.
            asked: the client's sampling parameters.
            first_choice: its number among the request's choices; None: beam search.
        """
        try:
            images = _images(prompt, first_choice)
        except InvalidRequest as error:
            self.failure = error
            raise
        assert first_choice is not None
        if images and self.said is not None:
            self.said.give_up()
        rollouts = self._turn.rollout_ids
        if 1 < len(rollouts) < first_choice + asked.n:
            self.failure = InvalidRequest(
                f"x-rollout-id: expected one id, or one for each choice, got {len(rollouts)} for "
                f"{first_choice + asked.n} choices"
            )
            raise self.failure
        answers: dict[int, _Answer] = {}
        async with aclosing(self._once_opened(stream)) as outputs:
            async for output in outputs:
                if self.said is not None:
                    if self.said.repeats:
                        await asyncio.sleep(0)  # they come without a pause, and other requests wait
                    self.said.add(output, adapter(), with_logprobs=asked.num_logprobs is not None)
                finished = []
                for completion in output.outputs:
                    answer = answers.setdefault(completion.index, _Answer())
                    answer.add(completion, is_delta=asked.output_kind.name == "DELTA")
                    if asked.num_logprobs is None:
                        completion.logprobs = completion.cumulative_logprob = None
                    if completion.finish_reason is not None and answer.token_ids:
                        choice = first_choice + completion.index
                        turn = self._captured(output, completion, asked, answer, choice, adapter(), images)
                        finished.append((rollouts[choice if len(rollouts) > 1 else 0], turn))
                    completion.routed_experts = None  # megabytes, which the trainer gets from the ledger
                if finished:
                    await self._record(finished)
                yield output

    async def _once_opened(self, stream: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """The engine's outputs. It ends what cannot be recorded: also an answer that is one output, at its
        end."""

        async def first() -> Any:
            return await anext(stream)

        async with aclosing(stream):
            try:
                async with asyncio.TaskGroup() as group:
                    output = group.create_task(first())
                    group.create_task(self.opened())
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            yield output.result()
            async for each in stream:
                yield each

    def _captured(
        self,
        output: Any,
        completion: Any,
        asked: Any,
        answer: "_Answer",
        choice: int,
        adapter: str | None,
        images: tuple[CapturedImage, ...],
    ) -> CapturedTurn:
        positions = len(output.prompt_token_ids) + len(answer.token_ids) - 1
        if (ids := completion.routed_experts) is not None and len(ids) != positions:
            self.failure = SlipstreamError(
                f"x-rollout-id: expected routed experts of {positions} positions, the engine returned "
                f"{len(ids)}"
            )
            raise self.failure
        return CapturedTurn(
            key=f"{self._turn.request}/{choice}",
            attempt=self._turn.attempt,
            prompt_token_ids=array("i", output.prompt_token_ids).tobytes(),
            token_ids=answer.token_ids.tobytes(),
            logprobs=answer.logprobs.tobytes(),
            weight_versions=tuple(
                (int(span.version), span.start, span.end) for span in completion.weight_versions or ()
            ),
            adapter=adapter,
            constrained=asked.structured_outputs is not None,
            finish_reason=completion.finish_reason,
            sampling={name: getattr(asked, name) for name in SAMPLING},
            images=images,
            routed_experts=_routed(ids),
        )

    async def _record(self, turns: Sequence[tuple[str, CapturedTurn]]) -> None:
        try:
            await self._ledger("append", self._turn.owner, turns)
        except SlipstreamError as error:
            self.failure = error
            raise


def _images(prompt: Any, first_choice: int | None) -> tuple[CapturedImage, ...]:
    """Raises InvalidRequest: a trainer could not learn from it."""
    hashes = prompt["mm_hashes"] if prompt["type"] == "multimodal" else {}
    if prompt["type"] not in ("token", "multimodal") or first_choice is None or set(hashes) - {"image"}:
        raise InvalidRequest(
            "x-rollout-id: expected a prompt of tokens and images, and no beam search: a trainer could not "
            "learn from others"
        )
    found = []
    places = prompt["mm_placeholders"]["image"] if hashes else ()
    for key, place in zip(hashes.get("image", ()), places, strict=True):
        content = image_files.FILES.get(key)
        if content is None:
            raise InvalidRequest(
                "x-rollout-id: expected images as files (image_url), without a uuid of their own, got one "
                "whose file is not known"
            )
        digest = sha256(content).hexdigest()
        found.append(CapturedImage(offset=place.offset, digest=digest, content=content))
    return tuple(sorted(found, key=lambda image: image.offset))


def _routed(ids: Any) -> RoutedExperts | None:
    if ids is None:
        return None
    _, layers, top_k = ids.shape
    return RoutedExperts(layers=layers, top_k=top_k, dtype=str(ids.dtype), ids=ids.tobytes())  # type: ignore[arg-type]


class _Answer:
    def __init__(self) -> None:
        self.token_ids, self.logprobs = array("i"), array("f")

    def add(self, completion: Any, *, is_delta: bool) -> None:
        known = 0 if is_delta else len(self.token_ids)
        for token, by_token in zip(completion.token_ids[known:], completion.logprobs[known:], strict=True):
            self.token_ids.append(token)
            self.logprobs.append(by_token[token].logprob)
