"""Captured streams whose replica is lost, from the ingress to replicas' fronts; only engines are fakes."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.http.test_rollout_routes import CHAT, OPERATOR, Scene, serving

ANSWER = [3, 4, 5, 6, 7]


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with serving(tmp_path) as made:
        yield made


async def streamed(scene: Scene, **options: Any) -> tuple[list[int], dict[str, Any] | None]:
    """The tokens that the client got, and its error."""
    answer = await scene.chat("a", [1, 2], ANSWER, stream=True, **options)
    assert answer.status_code == 200 and b"said" not in answer.content
    tokens, error = [], None
    for event in filter(None, answer.text.split("\n\n")):
        data = event.removeprefix("data: ")
        if data == "[DONE]":
            break
        found = json.loads(data)
        error = found.get("error")
        for choice in found.get("choices", ()):
            tokens += json.loads(choice["text"])
    return tokens, error


def continued(scene: Scene) -> list[list[int]]:
    """What the engines were told that had been said."""
    return sorted(said for engine in scene.fleet.engines.values() for said in engine.continued)


@pytest.mark.parametrize("at", [1, 3, 5])
async def test_the_client_sees_no_error_and_every_token_once(scene: Scene, at: int) -> None:
    """Also if the last token had been said, and the stream's end had not."""
    assert await streamed(scene, dies_at=[at]) == (ANSWER, None)
    assert continued(scene) == [[], ANSWER[:at]]
    await scene.post("a/reward", reward=1)
    ((rollout,),) = (group["rollouts"] for group in (await scene.take())["groups"])
    (sequence,) = rollout["sequences"]
    assert (sequence["token_ids"], sequence["loss_mask"]) == (ANSWER, [True] * 5)
    assert sequence["logprobs"] == [-float(token) for token in ANSWER]


@pytest.mark.parametrize("own", [{}, {"request_id": "mine"}])
async def test_events_of_all_replicas_have_one_id(scene: Scene, own: dict[str, str]) -> None:
    await streamed(scene, dies_at=[3], **own)
    first, second = (name for engine in scene.fleet.engines.values() for name in engine.ids)
    assert first == second is not None and first == own.get("request_id", first)


async def test_a_client_may_want_the_error(scene: Scene) -> None:
    tokens, error = await streamed(scene, dies_at=[3], continues="false")
    assert tokens == ANSWER[:3] and continued(scene) == []
    assert error is not None and error["type"] == "replica_unavailable"


async def test_an_answer_of_several_choices_ends_with_the_error(scene: Scene) -> None:
    tokens, error = await streamed(scene, dies_at=[3], n=2)
    assert error is not None and error["type"] == "replica_unavailable"
    assert tokens == ANSWER[:3] and continued(scene) == [[]]


async def test_a_second_loss_ends_the_stream_and_quarantines_the_request(scene: Scene) -> None:
    tokens, error = await streamed(scene, dies_at=[2, 4])
    assert tokens == ANSWER[:4] and error is not None
    answer = await scene.chat("a", [1, 2], ANSWER, stream=True, dies_at=[2, 4])
    assert (answer.status_code, answer.json()["error"]["type"]) == (422, "deadly_request")


async def test_a_request_whose_answer_was_completed_is_not_what_ends_replicas(tmp_path: Path) -> None:
    """As when replicas are lost one after the other under a group's requests, which are alike."""
    async with serving(tmp_path, replicas="abc") as scene:
        for _ in range(2):
            assert await streamed(scene, dies_at=[3]) == (ANSWER, None)


async def test_a_stream_moves_on_with_each_orderly_stop(tmp_path: Path) -> None:
    async with serving(tmp_path, replicas="abc") as scene:
        for front in scene.fleet.fronts.values():
            front.in_order = True
        assert await streamed(scene, dies_at=[2, 4]) == (ANSWER, None)
        assert continued(scene) == [[], ANSWER[:2], ANSWER[:4]]


@pytest.mark.parametrize("opens", [0, 2])
async def test_another_adapter_does_not_continue_an_answer(scene: Scene, opens: int) -> None:
    """Also if the second replica has begun to answer: its error is none of the events that come again."""
    for name, engine in scene.fleet.engines.items():
        engine.adapter = f"math@{name}"
    tokens, error = await streamed(scene, dies_at=[3], opens=opens)
    assert tokens == ANSWER[:3]
    assert error is not None and "another prompt or adapter" in error["message"]


async def test_what_routers_tell_replicas_cannot_be_sent_by_clients(scene: Scene) -> None:
    """It says how much of the body is the client's."""
    headers = {"x-rollout-id": "a", "x-rollout-continue": "false", "x-slipstream-said": "1", **OPERATOR}
    body = {"prompt": [1], "answer": [2]}
    assert (await scene.client.post(CHAT, json=body, headers=headers)).status_code == 200
