import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from app.client.connection import AsyncFleetClient, FleetError
from app.jobs.environments.relay import CHAT, GENERATE, AgentSession, Relay
from app.jobs.policy import DISTRIBUTION, Policy
from tests.app.fake_answers import chat_choice, client_of, refusal

Respond = Callable[[httpx.Request], httpx.Response | Awaitable[httpx.Response]]


@asynccontextmanager
async def relayed(
    respond: Respond, *, version: int | None = None, group: str | None = None
) -> AsyncIterator[tuple[AgentSession, httpx.AsyncClient]]:
    relay = Relay()
    async with (
        relay.listening(),
        client_of(respond, patience_s=0.0) as client,
        httpx.AsyncClient(trust_env=False, verify=False) as agent,
        relay.session(
            Policy(client=client, model="m", max_tokens=50, version=version, group=group)
        ) as session,
    ):
        yield session, agent


async def test_requests_are_sampled_as_the_policy_wants_and_name_their_rollout() -> None:
    seen: list[httpx.Request] = []

    def respond(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(
            200, json={"choices": [chat_choice([5, 6])], "prompt_token_ids": [1, 2], "id": "x"}
        )

    async with relayed(respond, version=3, group="r.4") as (session, agent):
        body = {"model": "other", "messages": [], "temperature": 0.1, "n": 4, "max_tokens": 9, "tools": ["t"]}
        body["seed"] = 1  # of all attempts, which would be the same
        for name in ("s", "s", "a judge's"):
            got = await agent.post(f"{session.url}{CHAT}", json=body, headers={"X-Session-ID": name})
    assert got.json()["id"] == "x"
    sent = json.loads(seen[0].content)
    assert (
        sent.items()
        >= {**DISTRIBUTION, "model": "m", "n": 1, "max_completion_tokens": 9, "tools": ["t"]}.items()
    )
    assert sent["return_token_ids"] and not {"max_tokens", "seed"} & set(sent)
    assert seen[0].headers["x-session-id"] == "s" and seen[0].headers["x-min-weight-version"] == "3"
    assert {name: len(kept) for name, kept in session.answers.items()} == {"s": 2, "a judge's": 1}
    mine, same, judge = (request.headers["x-rollout-id"] for request in seen)
    assert mine == same == session.rollouts["s"] != judge
    assert {request.headers["x-rollout-group"] for request in seen} == {"r.4"}
    assert len({request.headers["x-rollout-turn"] for request in seen}) == 3


@pytest.mark.parametrize("with_usage", [False, True])
@pytest.mark.slow
async def test_an_agent_that_streams_gets_the_whole_answer_in_one_event(with_usage: bool) -> None:
    import openai

    sent: list[dict[str, Any]] = []
    calls = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"amount": 5}'}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    whole = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "prompt_token_ids": [1]}
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}

    def respond(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        choices = [chat_choice([5, 6], finish_reason="tool_calls") | {"index": 0, "message": message}]
        return httpx.Response(200, json={**whole, "choices": choices, "usage": usage})

    async with relayed(respond) as (session, agent):
        client = openai.AsyncOpenAI(base_url=f"{session.url}/v1", api_key="none", http_client=agent)
        options: Any = {"stream_options": {"include_usage": True}} if with_usage else {}
        stream = await client.chat.completions.create(model="other", messages=[], stream=True, **options)
        events = [event async for event in stream]
    assert not {"stream", "stream_options"} & set(sent[0])
    (chosen,) = [each for event in events for each in event.choices]
    assert chosen.finish_reason == "tool_calls" and chosen.delta.tool_calls is not None
    (called,) = chosen.delta.tool_calls
    assert called.index == 0 and called.function is not None and called.function.arguments == '{"amount": 5}'
    assert [event.usage.total_tokens for event in events if event.usage] == ([3] if with_usage else [])
    (kept,) = session.answers[""]
    assert kept.token_ids == [5, 6]


async def test_token_ids_go_in_and_out() -> None:
    sent: list[dict[str, Any]] = []

    def respond(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        labelled = chat_choice([5]) | {
            "weight_versions": [{"version": "3", "start": 0, "end": 1}]
        }  # as vLLM writes it
        return httpx.Response(200, json={"choices": [labelled]})

    async with relayed(respond) as (session, agent):
        body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 500, "logprobs": 1, "seed": 2}}
        assert (await agent.post(f"{session.url}{GENERATE}", json=body)).status_code == 200
    assert sent[0]["sampling_params"] == {**DISTRIBUTION, "max_tokens": 50, "logprobs": 1, "n": 1}
    assert session.answers[""][0].newest_version == 3


LONG = "This model's maximum context length is 8 tokens"


@pytest.mark.parametrize(
    ("status", "message", "is_failure", "is_too_long"),
    [
        (400, LONG, False, True),
        (413, "the body is too large", False, True),
        (400, "this model calls no tools", False, False),
        (503, LONG, True, False),
    ],
)
async def test_what_the_fleet_refuses_reaches_the_agent(
    status: int, message: str, is_failure: bool, is_too_long: bool
) -> None:
    async with relayed(lambda _: refusal(status, "x", message)) as (session, agent):
        got = await agent.post(f"{session.url}{CHAT}", json={"messages": []})
    assert got.status_code == status and got.json()["error"]["message"] == message
    assert (session.failure is not None) is is_failure and not session.answers
    assert session.refused == (message if is_too_long else None)


async def test_a_failed_request_ends_the_rollout_and_the_fleet_is_not_asked_again() -> None:
    asked: list[httpx.Request] = []

    def respond(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return refusal(503, "x", "no replica")

    async with relayed(respond) as (session, agent):
        for expected in (503, 409):
            got = await agent.post(f"{session.url}{CHAT}", json={"messages": []})
            assert got.status_code == expected and "no replica" in got.json()["error"]["message"]
    assert len(asked) == 1 and isinstance(session.failure, FleetError)


async def test_an_agent_that_hangs_up_is_not_learned_from() -> None:
    began, goes_on = asyncio.Event(), asyncio.Event()

    async def respond(request: httpx.Request) -> httpx.Response:
        began.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            goes_on.set()
            raise
        return httpx.Response(200, json={"choices": [chat_choice([5])], "prompt_token_ids": [1]})

    async with relayed(respond) as (session, agent):
        asking = asyncio.create_task(agent.post(f"{session.url}{CHAT}", json={"messages": []}))
        await asyncio.wait_for(began.wait(), 60)
        asking.cancel()
        await asyncio.wait_for(goes_on.wait(), 60)
    assert not session.answers


async def test_an_address_is_reused_once_its_rollout_is_over_and_answers_nothing_in_between() -> None:
    relay = Relay()
    async with relay.listening(), httpx.AsyncClient(trust_env=False, verify=False) as agent:
        policy = Policy(client=AsyncFleetClient(agent), model="m", max_tokens=5)
        async with relay.session(policy) as first, relay.session(policy) as second:
            first.over = True
        got = await asyncio.wait_for(agent.post(f"{first.url}{CHAT}", json={"messages": []}), 10)
        assert got.status_code == 404
        async with relay.session(policy) as third:
            pass
    assert third.url == first.url != second.url and not third.over


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("/v1/completions", b"{}", 404),
        (CHAT, b"no JSON", 400),
        (CHAT, b"[]", 400),
        (CHAT, b'{"messages": [], "stream": true, "stream_options": 5}', 400),
        (GENERATE, b'{"token_ids": [1], "stream": true}', 400),
        (CHAT, b'{"max_tokens": "many"}', 400),
        (CHAT, b'{"max_tokens": Infinity}', 400),
        (GENERATE, b'{"token_ids": "abc"}', 400),
        (GENERATE, b'{"token_ids": [1], "sampling_params": 5}', 400),
    ],
)
async def test_anything_else_is_refused(path: str, content: bytes, status: int) -> None:
    async with relayed(lambda _: httpx.Response(500)) as (session, agent):
        assert (await agent.post(f"{session.url}{path}", content=content)).status_code == status
    assert session.failure is None
