"""What an engine answers is recorded below the routes, and they see nothing of it."""

import asyncio
import io
from array import array
from collections.abc import AsyncGenerator
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import PlaceholderRange
from vllm.multimodal.media.image import ImageMediaIO

from deployments.protocol.errors import FleetUnavailable, InvalidRequest, SlipstreamError
from deployments.protocol.rollouts import CapturedTurn, RolloutRequest
from deployments.replica import image_files
from deployments.replica.capture import Capture
from deployments.replica.image_files import ImageFiles
from tests.deployments.engine_outputs import generated, sampling_params
from trainers.trajectory import RoutedExperts

TURN = RolloutRequest(rollout_ids=("a",), owner="ann", request="r", attempt=5)


class Recorder:
    """Stands for the controller."""

    def __init__(self) -> None:
        self.turns: list[CapturedTurn] = []
        self.calls: list[list[str]] = []  # rollouts
        self.fails = ""  # a call

    async def call(self, name: str, *arguments: Any) -> None:
        if self.fails == name:
            raise FleetUnavailable("the disk is full")
        if name == "open":
            return
        owner, turns = arguments
        assert owner == TURN.owner
        self.turns += [captured for _, captured in turns]
        self.calls.append([rollout for rollout, _ in turns])


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


async def outputs(capture: Capture, *, delta: bool, logprobs: int | None = None, **options: Any) -> list[Any]:
    asked = sampling_params(delta=delta, logprobs=logprobs, grammar=options.pop("grammar", None), choices=2)
    assert capture.sampling(asked).logprobs is not None
    assert asked.logprobs == logprobs, "the route's own are as before"
    first = options.pop("first", 0)
    images = {name: value for name, value in options.items() if name.startswith("mm_")}
    prompt = {"type": options.pop("kind", "token"), **images}
    stream = generated([1, 2], [[3, 4], [5]], delta=delta, routed=options.get("routed"))
    return [
        each async for each in capture.taken(stream, prompt, asked, first, lambda: options.get("adapter"))
    ]


@pytest.mark.parametrize("delta", [True, False])
async def test_each_choice_is_a_turn(recorder: Recorder, delta: bool) -> None:
    await outputs(Capture(TURN, recorder.call), delta=delta, first=2, grammar={}, adapter="math@4")
    first, second = recorder.turns
    assert (first.key, second.key, first.attempt) == ("r/2", "r/3", 5)
    assert array("i", first.prompt_token_ids).tolist() == [1, 2]
    assert array("i", first.token_ids).tolist() == [3, 4]
    assert array("f", first.logprobs).tolist() == [-3.0, -4.0]
    assert first.weight_versions == ((7, 0, 2),) and first.adapter == "math@4"
    assert first.constrained and first.finish_reason == "stop" and first.sampling["temperature"] == 0.7


async def test_routed_experts_are_the_turns_and_not_in_the_answer(recorder: Recorder) -> None:
    ids = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    capture = Capture(TURN, recorder.call)
    with pytest.raises(
        SlipstreamError, match="expected routed experts of 2 positions, the engine returned 3"
    ):
        await outputs(capture, delta=True, routed=ids)
    (turn,) = recorder.turns
    assert turn.routed_experts == RoutedExperts(layers=2, top_k=2, dtype="uint8", ids=bytes(range(12)))
    assert capture.failure is not None, "the second answer has a token less"


@pytest.mark.parametrize("delta", [True, False])
async def test_each_choice_is_the_turn_of_its_own_rollout(recorder: Recorder, delta: bool) -> None:
    several = replace(TURN, rollout_ids=("a", "b"))
    await outputs(Capture(several, recorder.call), delta=delta)
    assert recorder.calls == ([["a"], ["b"]] if delta else [["a", "b"]])
    assert [each.key for each in recorder.turns] == ["r/0", "r/1"]
    with pytest.raises(InvalidRequest, match="or one for each choice, got 2 for 4 choices"):
        await outputs(Capture(several, recorder.call), delta=delta, first=2)


@pytest.mark.parametrize("delta", [True, False])
async def test_the_client_gets_log_probabilities_only_if_it_asked(recorder: Recorder, delta: bool) -> None:
    seen = await outputs(Capture(TURN, recorder.call), delta=delta)
    assert all(each.logprobs is each.cumulative_logprob is None for out in seen for each in out.outputs)
    seen = await outputs(Capture(TURN, recorder.call), delta=delta, logprobs=0)
    assert all(each.logprobs for out in seen for each in out.outputs)


async def test_a_turn_is_recorded_before_its_last_output_passes(recorder: Recorder) -> None:
    stream = generated([1], [[3, 4]], delta=True)
    asked, prompt = sampling_params(delta=True), {"type": "token"}
    taken = Capture(TURN, recorder.call).taken(stream, prompt, asked, 0, lambda: None)
    await anext(taken)
    assert recorder.turns == []
    last = await anext(taken)
    assert last.outputs[0].token_ids == [4] and len(recorder.turns) == 1


@pytest.mark.parametrize("call", ["open", "append"])
async def test_what_cannot_be_recorded_fails(recorder: Recorder, call: str) -> None:
    recorder.fails = call
    capture = Capture(TURN, recorder.call)
    with pytest.raises(FleetUnavailable):
        await outputs(capture, delta=False)
    assert capture.failure is not None and capture.failure.message == "the disk is full"


async def test_a_refusal_does_not_wait_for_the_engine(recorder: Recorder) -> None:
    """An answer that is not streamed is one output, at its end."""
    never, ended = asyncio.Event(), asyncio.Event()

    async def stream() -> AsyncGenerator[Any, None]:
        try:
            await never.wait()
            yield
        finally:
            ended.set()

    recorder.fails = "open"
    capture, asked = Capture(TURN, recorder.call), sampling_params(delta=False)
    with pytest.raises(FleetUnavailable):
        async with asyncio.timeout(5):
            await anext(capture.taken(stream(), {"type": "token"}, asked, 0, lambda: None))
    assert ended.is_set() and capture.failure is not None


@pytest.mark.parametrize("call", ["open", "append"])
async def test_the_engine_ends_what_cannot_be_recorded(recorder: Recorder, call: str) -> None:
    """vLLM aborts a request when its stream is closed; garbage would be collected much later."""
    ended: list[int] = []

    async def stream() -> AsyncGenerator[Any, None]:
        try:
            async for each in generated([1, 2], [[3, 4], [5]], delta=True):
                yield each
        finally:
            ended.append(1)

    recorder.fails = call
    capture = Capture(TURN, recorder.call)
    asked, prompt = sampling_params(delta=True, choices=2), {"type": "token"}
    with pytest.raises(FleetUnavailable):
        async for _ in capture.taken(stream(), prompt, asked, 0, lambda: None):
            pass
    assert ended


@pytest.mark.parametrize(
    "options", [{"first": None}, {"kind": "embeds"}, {"kind": "multimodal", "mm_hashes": {"video": ["a"]}}]
)
async def test_beams_embeddings_and_videos_are_refused(recorder: Recorder, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="tokens and images, and no beam search"):
        await outputs(Capture(TURN, recorder.call), delta=False, **options)


def seen(*keys: str) -> dict[str, Any]:
    places = [PlaceholderRange(offset=10 * number, length=4) for number in range(len(keys))]
    hashes, ranges = {"image": list(keys)}, {"image": places}
    return {"kind": "multimodal", "mm_hashes": hashes, "mm_placeholders": ranges}


async def test_a_turn_has_the_files_that_vllm_has_hashed(recorder: Recorder) -> None:
    image_files.install()
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    loaded = ImageMediaIO().load_bytes(file.getvalue())
    key = MultiModalHasher.hash_kwargs("blake3", model_id="m", image=loaded)
    await outputs(Capture(TURN, recorder.call), delta=False, **seen(key, key))
    for turn in recorder.turns:
        assert [each.offset for each in turn.images] == [0, 10]
        assert {each.content for each in turn.images} == {file.getvalue()}
        assert turn.images[0].digest == sha256(file.getvalue()).hexdigest()
    with pytest.raises(InvalidRequest, match="without a uuid of their own, got one whose file is not known"):
        await outputs(Capture(TURN, recorder.call), delta=False, **seen("mine"))


def test_the_oldest_files_make_room() -> None:
    files = ImageFiles(max_bytes=10)
    for key in "abc":
        files.put(key, bytes(4))
    files.put("d", bytes(20))
    assert [files.get(key) is not None for key in "abcd"] == [False, False, False, True]


async def test_each_replica_makes_the_same_ids(recorder: Recorder) -> None:
    first, second = (Capture(TURN, recorder.call) for _ in range(2))
    ids = [first.next_id(), first.next_id()]
    assert len(set(ids)) == 2 and ids == [second.next_id(), second.next_id()]
