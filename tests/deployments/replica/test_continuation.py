"""A half-said answer in vLLM's own output processor and engine core request, without an engine."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
import torch
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.tokenizers import TokenizerLike, get_tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request
from vllm.v1.worker import worker_base  # as in a worker
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from deployments.protocol.errors import Conflict
from deployments.protocol.rollouts import RolloutRequest
from deployments.replica import continuation
from deployments.replica.capture import Capture
from deployments.replica.continuation import TOKENS, TURN, Said, resume
from deployments.replica.replica_engine import RecordingLLM
from deployments.replica.spans import RECORDER, SpanRecorder
from tests.tiny_models import save_tokenizer

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerLike:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return get_tokenizer(str(directory))


def sampling(**options: Any) -> SamplingParams:
    options = {"logprobs": 0, "max_tokens": 50, "output_kind": RequestOutputKind.DELTA} | options
    return SamplingParams(**options)


def engine_request(params: SamplingParams, prompt: Sequence[int] = PROMPT) -> EngineCoreRequest:
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    request.external_req_id = "r"
    return request


class Replica:
    """vLLM's half of a replica that is before the engine core; what the router was told is in `told`."""

    def __init__(
        self,
        tokenizer: TokenizerLike,
        params: SamplingParams,
        received: bytes = b"",
        prompt: Sequence[int] = PROMPT,
        adapter: str | None = None,
        *,
        traced: bool = False,
    ) -> None:
        self._processor = OutputProcessor(tokenizer, log_stats=traced, tracing_enabled=traced)
        self._said, self._adapter, self.params = Said(received), adapter, params
        self.told = b""
        self.request = engine_request(params, prompt)
        self._queue = RequestOutputCollector(RequestOutputKind.DELTA, "r")
        self._processor.add_request(self.request, None, queue=self._queue)
        replaying = self._said.replay(self._processor, self.request, self._queue, adapter)
        self.begins = asyncio.run(replaying)
        self.outputs: list[RequestOutput] = []
        while (output := self._queue.get_nowait()) is not None:
            self._take(output)

    def samples(
        self,
        tokens: Sequence[int],
        version: str = "7",
        finish: FinishReason | None = None,
        stop_reason: int | str | None = None,
        routed: Any = None,
    ) -> None:
        """A step of the engine; each token's two best are it and the next one."""
        ids = np.array([[token, token, token + 1] for token in tokens])
        logprobs = np.array([[-0.5, -0.5, -1.5]] * len(tokens), dtype=np.float32)
        output = EngineCoreOutput(
            request_id="r",
            new_token_ids=list(tokens),
            new_logprobs=LogprobsLists(ids, logprobs, np.array([1] * len(tokens)), None),
            finish_reason=finish,
            stop_reason=stop_reason,
            routed_experts=routed,
        )
        self._processor.process_outputs([output], weight_version=version)
        output_now = self._queue.get_nowait()
        assert isinstance(output_now, RequestOutput)
        self._take(output_now)

    def _take(self, output: Any) -> None:
        self._said.add(output, self._adapter, with_logprobs=self.params.logprobs != 0)
        self.told += self._said.news()
        self.outputs.append(output)


def seen(replica: Replica) -> list[tuple[Any, ...]]:
    """What the serving code makes events of."""
    return [
        (
            *(output.prompt_token_ids, output.finished, choice.text, list(choice.token_ids)),
            *(choice.logprobs if replica.params.logprobs else None,),
            *(choice.finish_reason, choice.stop_reason, choice.weight_versions),
        )
        for output in replica.outputs
        for choice in output.outputs
    ]


def ids(tokenizer: TokenizerLike, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    "options", [{}, {"logprobs": 2}, {"stop": ["héh"]}, {"stop": ["héh"], "include_stop_str_in_output": True}]
)
@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4])
def test_the_rest_is_as_if_nothing_had_been_cut(
    tokenizer: TokenizerLike, options: dict[str, Any], cut: int
) -> None:
    """Also in the middle of a character, and of a stop string."""
    a, h, *e_acute, h_again = ids(tokenizer, "ahéh")
    steps = [[a], [h], [e_acute[0]], [e_acute[1], h_again]]
    whole = Replica(tokenizer, sampling(**options))
    first = Replica(tokenizer, sampling(**options))
    for number, step in enumerate(steps):
        finish = FinishReason.LENGTH if number == 3 else None
        whole.samples(step, finish=finish)
        if number < cut:
            first.samples(step, finish=finish)
    second = Replica(tokenizer, sampling(**options), first.told)
    assert second.begins == (cut < 4), "all was said: the engine is not asked"
    said = [token for step in steps[:cut] for token in step]
    assert (second.request.sampling_params.extra_args or {}).get(TOKENS, []) == said
    for number, step in enumerate(steps[cut:], cut):
        second.samples(step, finish=FinishReason.LENGTH if number == 3 else None)
    assert seen(second) == seen(whole) and seen(whole)[-1][5] is not None
    assert first.told + second.told == whole.told


@pytest.mark.parametrize(
    ("finish", "reason"),
    [(FinishReason.STOP, None), (FinishReason.STOP, 11), (FinishReason.REPETITION, "repetition_detected")],
)
def test_an_answer_that_the_engine_has_ended_is_over(
    tokenizer: TokenizerLike, finish: FinishReason, reason: int | str | None
) -> None:
    first = Replica(tokenizer, sampling())
    first.samples([10, 11], finish=finish, stop_reason=reason)
    for traced in (False, True):
        second = Replica(tokenizer, sampling(), first.told, traced=traced)
        assert not second.begins and seen(second) == seen(first)


def test_spans_are_those_of_both_replicas(tokenizer: TokenizerLike) -> None:
    first = Replica(tokenizer, sampling())
    first.samples([10, 11])
    first.samples([12], version="8")
    second = Replica(tokenizer, sampling(), first.told)
    second.samples([13], version="8")
    second.samples([14], version="9", finish=FinishReason.LENGTH)
    spans = second.outputs[-1].outputs[0].weight_versions
    assert [(each.version, each.start, each.end) for each in spans] == [("7", 0, 2), ("8", 2, 4), ("9", 4, 5)]


def test_other_requests_have_turns_while_a_long_answer_is_said_again(tokenizer: TokenizerLike) -> None:
    """A client may leave meanwhile."""
    pieces, turns = 3 * TURN, 0
    params = sampling(max_tokens=pieces + 1)
    first = Replica(tokenizer, params)
    for _ in range(pieces):
        first.samples([10])
    processor, request = OutputProcessor(tokenizer, log_stats=False), engine_request(params)
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    core = SimpleNamespace(add_request_async=AsyncMock())
    llm: Any = SimpleNamespace(output_processor=processor, engine_core=core, check_admission=Mock())
    recorder = SpanRecorder(7)

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def added() -> Capture:
        turn = RolloutRequest(rollout_ids=("r",), owner="", request="q")
        recorder.capture = Capture(turn, AsyncMock(), Said(first.told))
        await RecordingLLM._add_request(llm, request, None, None, 0, queue)
        return recorder.capture

    async def replayed() -> AsyncGenerator[Any, None]:
        while (output := queue.get_nowait()) is not None:
            yield output

    async def again() -> int:
        RECORDER.set(recorder)
        leaving, beside = asyncio.create_task(added()), asyncio.create_task(other())
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert not processor.has_unfinished_requests() and not core.add_request_async.called
        queue.get_nowait()  # that it was aborted
        before = turns
        capture = await added()
        assert core.add_request_async.called and turns - before >= 3
        before = turns
        async for _ in capture.taken(replayed(), {"type": "token"}, params, 0, lambda: None):
            pass
        beside.cancel()
        return turns - before

    assert asyncio.run(again()) >= pieces


def test_routed_experts_are_those_of_both_replicas(tokenizer: TokenizerLike) -> None:
    """Each position's are those behind the token after it, though the next replica computes it again."""
    ids = np.arange(14, dtype=np.uint8).reshape(7, 1, 2)
    first = Replica(tokenizer, sampling())
    first.samples([10], routed=ids[:3])
    first.samples([11, 12], routed=ids[3:5])
    second = Replica(tokenizer, sampling(), first.told)
    second.samples([13], routed=ids[5:6])
    third = Replica(tokenizer, sampling(), first.told + second.told)
    third.samples([14], routed=ids[6:], finish=FinishReason.LENGTH)
    assert np.array_equal(third.outputs[-1].outputs[0].routed_experts, ids)
    ahead = Replica(tokenizer, sampling())
    ahead.samples([10], routed=ids[:4])
    assert ahead.told == b"null\n", "the next replica would begin at another position"


@pytest.mark.parametrize("options", [{"prompt": [5, 6, 8]}, {"adapter": "math@4"}])
def test_another_prompt_or_adapter_is_an_error(tokenizer: TokenizerLike, options: dict[str, Any]) -> None:
    first = Replica(tokenizer, sampling(), adapter="math@3")
    first.samples([10])
    with pytest.raises(Conflict, match="another prompt or adapter"):
        Replica(tokenizer, sampling(), first.told, **({"adapter": "math@3"} | options))


def test_an_answer_that_cannot_be_continued_says_so_once() -> None:
    said = Said()
    said.give_up()
    said.give_up()
    assert said.news() == b"null\n" and said.news() == b""


def test_an_answer_that_has_said_too_much_is_not_continued(
    tokenizer: TokenizerLike, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both replicas together."""
    monkeypatch.setattr(continuation, "MAX_BYTES", 100)
    first = Replica(tokenizer, sampling())
    first.samples([10])
    second = Replica(tokenizer, sampling(), first.told)
    assert not first.told.endswith(b"null\n")
    for token in (11, 12):
        second.samples([token])
    assert second.told.count(b"null\n") == 1 and second.told.endswith(b"null\n")


class Grammar:
    """A grammar that is being compiled, in vLLM's StructuredOutputManager."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(max_workers=1)
        self.compiled: Future[Any] = Future()
        self.accepted: list[int] = []

    def accept_tokens(self, request: Any, tokens: Sequence[int]) -> bool:
        assert request.structured_output_request.grammar == "compiled"
        self.accepted += tokens
        return 99 not in tokens


def core_request(grammar: Grammar, said: list[int]) -> Request:
    params = sampling(extra_args={TOKENS: said}, structured_outputs=StructuredOutputsParams(regex="a*"))
    made = Request.from_engine_core_request(engine_request(params), None)
    made.structured_output_request.grammar = grammar.compiled
    resume(SimpleNamespace(structured_output_manager=grammar), made)
    return made


def test_the_engine_core_continues_as_after_a_preemption() -> None:
    grammar = Grammar()
    made = core_request(grammar, [10, 11])
    assert (made.num_prompt_tokens, list(made.output_token_ids)) == (3, [10, 11])
    assert list(made.all_token_ids) == [*PROMPT, 10, 11]
    assert made.structured_output_request.grammar is None, "it is not compiled yet"
    grammar.compiled.set_result("compiled")
    grammar.executor.shutdown()
    assert (made.structured_output_request.grammar, grammar.accepted) == ("compiled", [10, 11])


def test_a_grammar_that_does_not_allow_what_was_said_fails_the_request() -> None:
    grammar = Grammar()
    grammar.compiled.set_result("compiled")
    made = core_request(grammar, [10, 99])
    grammar.executor.shutdown()
    assert isinstance(made.structured_output_request.grammar, ValueError)


def test_a_worker_of_the_first_model_runner_gets_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CachedRequestState, "__post_init__", CachedRequestState.__post_init__)
    assert worker_base is not None
    continuation.install()
    continuation.install()
    seeds = set()
    for params, expected in ((sampling(), []), (sampling(extra_args={TOKENS: [10, 11]}), [10, 11])):
        seeded = torch.Generator().manual_seed(-1)
        state = CachedRequestState(
            **{"req_id": "r", "prompt_token_ids": PROMPT, "mm_features": [], "sampling_params": params},
            **{"generator": seeded, "block_ids": ([0],), "num_computed_tokens": 0, "output_token_ids": []},
        )
        assert (state.output_token_ids, state.num_tokens) == (expected, 3 + len(expected))
        seeds.add(seeded.initial_seed())
    assert len(seeds) == 2, "the rest has other random numbers than the answer's first tokens"
