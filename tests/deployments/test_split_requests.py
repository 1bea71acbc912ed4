"""Lists of prompts over several replicas: real connections, fronts and router; vLLM's routes are fakes."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.deployments.routed_fleet import Fleet, service
from tests.waiting import reached

PROMPTS = [f"prompt {letter}" for letter in "abcdefgh"]
ROOM = {"max_body_bytes": 10_000}


def asked_of(fleet: Fleet) -> dict[str, list[Any]]:
    """The prompts that reached each replica."""
    return {
        name: [body["prompt"] for body in engine.completions.bodies] for name, engine in fleet.engines.items()
    }


@pytest.mark.slow
async def test_list_is_answered_by_all_replicas_as_by_one() -> None:
    asked = {"prompt": PROMPTS, "n": 2, "logprobs": 1, "prompt_logprobs": 1, "return_token_ids": True}
    async with service("a", **ROOM) as (_, _, client):
        alone = (await client.post("/v1/completions", json=asked)).json()
    async with service("a", "b", **ROOM) as (fleet, router, client):
        answer = await client.post("/v1/completions", json=asked)
        assert asked_of(fleet) == {"a": [PROMPTS[:4]], "b": [PROMPTS[4:]]}
        assert answer.headers["x-slipstream-replica"] == "a, b"
        assert answer.headers["x-weight-version"] == "7"
        assert int(answer.headers["content-length"]) == len(answer.content)
        together = answer.json()
        for whole in (alone, together):
            assert whole.pop("id").startswith("cmpl-") and whole.pop("created")
        assert together == alone | {"metrics": None}
        assert [choice["index"] for choice in together["choices"]] == list(range(16))
        await reached(lambda: router.in_flight == 0)


async def test_replicas_know_how_many_sequences_they_have_of_each_router() -> None:
    async with service("a", "b", **ROOM) as (fleet, _, client):
        asked = {"prompt": ["slow", *PROMPTS[:6], "slow"], "n": 2}
        headers = {"x-slipstream-router": "guess,99"}
        posted = asyncio.create_task(client.post("/v1/completions", json=asked, headers=headers))
        await reached(lambda: all(engine.completions.bodies for engine in fleet.engines.values()))
        counts = [front.load for front in fleet.fronts.values()]
        assert [list(each.values()) for each in counts] == [[8], [8]]
        assert len({name for each in counts for name in each}) == 1
        for engine in fleet.engines.values():
            engine.completions.lives.set()
        assert (await posted).status_code == 200
        await reached(lambda: [front.load for front in fleet.fronts.values()] == [{}, {}])


async def test_every_part_has_the_demands_and_the_name_of_the_request() -> None:
    async with service("a", "b", **ROOM) as (fleet, _, client):
        headers = {"x-request-id": "mine", "x-min-weight-version": "7", "x-slipstream-part": "5,5"}
        answer = await client.post("/v1/completions", json={"prompt": PROMPTS}, headers=headers)
        assert answer.json()["id"] == "cmpl-mine"
        assert [choice["index"] for choice in answer.json()["choices"]] == list(range(8))
        assert {demand.min_version for demand in fleet.demands} == {7}
        refused = {"x-min-weight-version": "8", "x-weight-timeout": "0.5"}
        answer = await client.post("/v1/completions", json={"prompt": PROMPTS}, headers=refused)
        assert (answer.status_code, answer.json()["error"]["detail"]) == (409, {"waited_s": 0.5})


async def test_client_cannot_ask_for_a_part() -> None:
    async with service("a", **ROOM) as (_, _, client):
        answer = await client.post(
            "/v1/completions", json={"prompt": "a"}, headers={"x-slipstream-part": "5,5"}
        )
        assert answer.json()["choices"][0]["index"] == 0


async def test_one_part_that_is_refused_answers_the_whole() -> None:
    async with service("a", "b", **ROOM) as (fleet, router, client):
        slow = ["slow", *PROMPTS[:6], "wrong"]
        answer = await client.post("/v1/completions", json={"prompt": slow})
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "a wrong prompt")
        await reached(lambda: fleet.engines["a"].completions.cancelled == 1)
        assert router.in_flight == 0


async def test_part_of_a_lost_replica_is_retried() -> None:
    async with service("a", "b", "c", **ROOM) as (fleet, _, client):
        fleet.loads = {"c": 100}
        fleet.engines["b"].completions.dies = True
        answer = await client.post("/v1/completions", json={"prompt": PROMPTS})
        assert [choice["text"] for choice in answer.json()["choices"]] == [each.upper() for each in PROMPTS]
        assert asked_of(fleet)["b"] == [PROMPTS[4:]]
        assert sum(PROMPTS[4:] in lists for lists in asked_of(fleet).values()) == 2
        assert sum(PROMPTS[:4] in lists for lists in asked_of(fleet).values()) == 1, "asked once"


async def test_part_that_loses_two_replicas_is_refused_and_so_is_its_repetition() -> None:
    async with service("a", "b", "c", **ROOM) as (fleet, _, client):
        for engine in fleet.engines.values():
            engine.completions.dies = True
        answer = await client.post("/v1/completions", json={"prompt": PROMPTS})
        assert (answer.status_code, answer.json()["error"]["type"]) == (422, "deadly_request")
        asked = sum(len(lists) for lists in asked_of(fleet).values())
        again = await client.post("/v1/completions", json={"prompt": PROMPTS})
        assert again.status_code == 422 and sum(len(lists) for lists in asked_of(fleet).values()) == asked


async def test_cancelled_request_aborts_all_parts() -> None:
    """Serve cancels it when the client disconnects."""
    async with service("a", "b", **ROOM) as (fleet, router, _):
        asked = {"prompt": ["slow", *PROMPTS[:6], "slow"]}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(router), base_url="http://fleet"
        ) as client:
            posted = asyncio.create_task(client.post("/v1/completions", json=asked))
            await reached(lambda: all(engine.completions.bodies for engine in fleet.engines.values()))
            posted.cancel()
            await reached(lambda: [each.completions.cancelled for each in fleet.engines.values()] == [1, 1])
        assert router.in_flight == 0
