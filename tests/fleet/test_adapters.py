"""LoRA adapters on real engines, driven as vLLM's clients do."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from app.client.completions import Answer
from tests.fleet import talk
from tests.fleet.adapter_fleet import SLOTS, Adapted
from tests.fleet.adapter_talk import (
    COUNT,
    Merged,
    entries,
    everywhere,
    load,
    models,
    newest,
    tokens,
)
from tests.fleet.deployed import MODEL
from tests.fleet.losing import process_of

pytestmark = [pytest.mark.serve, pytest.mark.fleet("gloo"), pytest.mark.timeout(600)]


LONG = 500  # tokens: more than are made while an adapter is loaded


def test_every_replica_answers_with_a_loaded_adapter_as_transformers_does(
    adapted: Adapted, client: httpx.Client
) -> None:
    checkpoint = talk.served_checkpoint(adapted.fleet)
    base = talk.Reference(checkpoint)(talk.PROMPT, COUNT)
    expected = Merged(checkpoint, 11)(talk.PROMPT, COUNT)
    assert expected != base
    talk.succeeded(load(client, "math", adapted.save("a11", 11)))
    [listed, also] = models(client)
    assert listed == also and listed == {"math", f"math@{newest(client, 'math')}"}
    for answer in everywhere(client, "math"):
        assert tokens(answer) == expected
        assert answer["adapter"].startswith("math@") and answer["model"] == answer["adapter"]
        assert answer["weight_version"] == adapted.fleet.version()
    for answer in everywhere(client, MODEL):
        assert tokens(answer) == base and "adapter" not in answer


def test_prompt_logprobs_are_refused_which_end_vllms_engine_in_a_batch(client: httpx.Client) -> None:
    """On a CPU with adapters: 24 requests at once, some of them with it, ended both replicas twice."""
    body = {"model": MODEL, "prompt": talk.PROMPT, "max_tokens": 1, "prompt_logprobs": 1}
    refused = client.post("/v1/completions", json=body)
    assert refused.status_code == 400 and "'prompt_logprobs': vLLM's engine" in refused.text


def test_a_version_continues_to_answer_what_began_with_it(adapted: Adapted, client: httpx.Client) -> None:
    paths = adapted.save("a11", 11), adapted.save("a12", 12)

    async def scenario(name: str) -> tuple[list[Answer], list[dict[str, Any]], int]:
        talk.succeeded(await asyncio.to_thread(load, client, name, paths[0]))
        async with httpx.AsyncClient(base_url=adapted.fleet.url, timeout=200) as asking:
            running = await asyncio.gather(
                *(talk.begun(asking, talk.PROMPT, LONG, model=name) for _ in range(4))
            )
            talk.succeeded(await asyncio.to_thread(load, client, name, paths[1], load_inplace=True))
            still = sum(not each.done() for each in running)
            later = await asyncio.to_thread(everywhere, client, name, COUNT)
            return await asyncio.gather(*running), later, still

    base = talk.served_checkpoint(adapted.fleet)
    first, second = Merged(base, 11), Merged(base, 12)(talk.PROMPT, COUNT)
    for attempt in range(5):  # a fast engine may be done before the second version is loaded
        answers, later, still = asyncio.run(scenario(f"run-{attempt}"))
        assert [first.continues(talk.PROMPT, answer.token_ids) for answer in answers] == [LONG] * 4
        assert [tokens(answer) for answer in later] == [second] * 2
        assert len({answer.adapter for answer in answers} | {each["adapter"] for each in later}) == 2
        if still:
            return
    pytest.fail("no request was running while the second version was loaded")


def test_base_rounds_keep_adapters_live(adapted: Adapted, client: httpx.Client) -> None:
    # A trainer that has learned to say one token samples nothing to learn from.
    talk.succeeded(client.post("/fleet/publish", json={"path": str(talk.saved(adapted.fleet, 56))}))
    talk.succeeded(load(client, "math", adapted.save("a11", 11)))
    before = [tokens(answer) for answer in everywhere(client, "math")]
    version = talk.train_and_publish(client)
    checkpoint = talk.served_checkpoint(adapted.fleet)
    expected = Merged(checkpoint, 11)(talk.PROMPT, COUNT)
    for answer in everywhere(client, "math"):
        assert tokens(answer) == expected != before[0]
        assert answer["choices"][0]["weight_versions"] == [{"version": version, "start": 0, "end": COUNT}]
    for answer in talk.on_every_replica(client, max_tokens=COUNT).values():
        assert answer.token_ids == talk.Reference(checkpoint)(talk.PROMPT, COUNT)
    last = client.get("/fleet/rounds").json()["rounds"][-1]
    assert last["phase"] == "committed" and not last["fenced"]


def test_more_adapters_than_an_engine_has_room_for_are_read_again_from_the_fleets_copy(
    adapted: Adapted, client: httpx.Client
) -> None:
    base = talk.served_checkpoint(adapted.fleet)
    seeds = range(21, 21 + SLOTS + 2)
    for seed in seeds:
        directory = adapted.save(f"a{seed}", seed)
        talk.succeeded(load(client, f"run-v{seed}", directory))
        adapted.save(f"a{seed}", 99)  # whatever becomes of the user's directory
    expected = {seed: Merged(base, seed)(talk.PROMPT, 12) for seed in seeds}
    for seed in seeds:
        assert [tokens(each) for each in everywhere(client, f"run-v{seed}", 12)] == [expected[seed]] * 2


def test_a_controller_that_dies_forgets_no_adapter(adapted: Adapted, client: httpx.Client) -> None:
    expected = Merged(talk.served_checkpoint(adapted.fleet), 11)(talk.PROMPT, COUNT)
    talk.succeeded(load(client, "math", adapted.save("a11", 11)))
    process_of(adapted.fleet, "controller").kill()
    assert [tokens(answer) for answer in everywhere(client, "math")] == [expected] * 2
    deadline = time.monotonic() + 60
    while (answer := load(client, "code", adapted.save("a12", 12))).status_code >= 500:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.5)
    talk.succeeded(answer)
    assert {each["name"] for each in entries(client)} == {"math", "code"}
