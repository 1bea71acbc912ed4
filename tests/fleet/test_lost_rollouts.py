"""A replica is killed under captured streams of every route: they continue on the other one."""

import asyncio
import json
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest

from tests.fleet.deployed import Fleet
from tests.fleet.losing import members, wait_for_another
from tests.fleet.processes import descendants, title
from tests.fleet.talk import succeeded
from tests.fleet.test_rollouts import ROUTES

pytestmark = [pytest.mark.serve, pytest.mark.fleet("gloo"), pytest.mark.timeout(600)]

COUNT = 300
GREEDY = {"temperature": 0.0, "ignore_eos": True}
INTEGERS = {"type": "array", "items": {"type": "integer"}, "minItems": COUNT}
CHAT = ROUTES["/v1/chat/completions"] | GREEDY
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", ROUTES["/v1/completions"] | GREEDY | {"max_tokens": COUNT}),
    ("/v1/responses", ROUTES["/v1/responses"] | GREEDY | {"max_output_tokens": COUNT}),
    ("/v1/messages", ROUTES["/v1/messages"] | GREEDY | {"max_tokens": COUNT}),
    (
        "/inference/v1/generate",
        ROUTES["/inference/v1/generate"] | {"sampling_params": GREEDY | {"max_tokens": COUNT}},
    ),
    # What was said counts.
    (
        "/v1/chat/completions",
        CHAT | {"max_tokens": COUNT, "frequency_penalty": 1.0, "logprobs": True, "top_logprobs": 2},
    ),
    (
        "/v1/chat/completions",
        CHAT
        | {"max_tokens": COUNT, "ignore_eos": False, "frequency_penalty": 0.1}
        | {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": INTEGERS}}},
    ),
]


class Stream:
    """One request of a rollout of its own."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.path, self.body, self.rollout = path, body | {"stream": True}, uuid.uuid4().hex
        self.replica = ""
        self.content = b""
        self.began_at = 0.0
        self.heard: list[float] = []

    async def read(self, client: httpx.AsyncClient) -> None:
        self.began_at = time.monotonic()
        headers = {"x-rollout-id": self.rollout, "x-session-id": "one replica"}
        async with client.stream("POST", self.path, json=self.body, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            self.replica = answer.headers["x-slipstream-replica"]
            async for piece in answer.aiter_raw():
                self.content += piece
                self.heard.append(time.monotonic())

    @property
    def text(self) -> str:
        """All that its deltas say; token ids where there is no text."""
        said = []
        for line in self.content.decode().splitlines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            delta = event.get("delta", {})
            said.append(delta if isinstance(delta, str) else delta.get("text", ""))
            for choice in event.get("choices", ()):
                said.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
                said.append(str(choice.get("token_ids") or ""))
        return "".join(said).replace("][", ", ")


def process_of(replica_id: str) -> psutil.Process:
    """By Serve's log of the replica, which its process holds open."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_replica = "ServeReplica:" in title(process)
            if is_replica and any(replica_id in file.path for file in process.open_files()):
                return process
    raise AssertionError(f"no process has a log of {replica_id}")


async def streams_of_every_route(
    fleet: Fleet, replicas: Mapping[str, psutil.Process]
) -> tuple[list[Stream], float]:
    """The one of `replicas` that has the streams is killed under them, if it is one. Not if a stream has
    ended before the others began, as on busy cores: 0.0."""
    streams, lost_at = [Stream(*each) for each in BODIES], 0.0
    async with httpx.AsyncClient(base_url=fleet.url, timeout=300) as client, asyncio.TaskGroup() as group:
        reading = [group.create_task(stream.read(client)) for stream in streams]
        while replicas and not all(len(stream.heard) > 4 for stream in streams):
            if any(task.done() for task in reading):
                return streams, lost_at
            await asyncio.sleep(0.01)
        if replicas:
            assert len({stream.replica for stream in streams}) == 1, "a session stays on one replica"
            victim = replicas[streams[0].replica]
            engine = descendants(victim)
            for process in engine:
                process.suspend()
            while max(stream.heard[-1] for stream in streams) > time.monotonic() - 0.3:
                await asyncio.sleep(0.01)
            if not any(task.done() for task in reading):
                lost_at = time.monotonic()  # all that it has made has arrived
            for process in (victim, *engine):
                process.kill() if lost_at else process.resume()
    return streams, lost_at


def sequences(client: httpx.Client, streams: list[Stream]) -> list[dict[str, Any]]:
    """What a trainer gets of them."""
    for stream in streams:
        succeeded(client.post(f"/rollouts/{stream.rollout}/reward", json={"reward": 1.0}))
    step = {"step": uuid.uuid4().hex, "groups": len(streams)}
    taken = succeeded(client.post("/rollouts/take", json=step)).json()
    found = {each["id"]: each["sequences"] for group in taken["groups"] for each in group["rollouts"]}
    return [sequence for stream in streams for sequence in found[stream.rollout]]


def test_what_was_said_comes_from_a_router_only(gloo: Fleet) -> None:
    with gloo.client() as client:
        body = ROUTES["/v1/completions"] | {"vllm_xargs": {"slipstream_said": [5]}}
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400 and "the fleet's own" in answer.text


def test_streams_of_every_route_survive_their_replica(gloo: Fleet) -> None:
    check_streams_of_every_route(gloo)


def check_streams_of_every_route(fleet: Fleet, logprob_tolerance: float = 1e-3) -> None:
    """A replica is killed under them; texts and rollouts are those of streams that were not cut."""
    whole, _ = asyncio.run(streams_of_every_route(fleet, {}))
    with fleet.client() as client:
        before = members(client)
        replicas = {replica_id: process_of(replica_id) for replica_id in before}
        tries = (asyncio.run(streams_of_every_route(fleet, replicas)) for _ in range(5))
        cut, lost_at = next((cut, lost_at) for cut, lost_at in tries if lost_at)
        for stream, unbroken in zip(cut, whole, strict=True):
            assert stream.text == unbroken.text and len(stream.text) > COUNT / 4, stream.path
            known = sum(at < lost_at for at in stream.heard)
            assert 0 < known < len(stream.heard), "the rest is the other replica's"
            pause_s, first_s = stream.heard[known] - lost_at, unbroken.heard[0] - unbroken.began_at
            print(f"{stream.path}: next event after {pause_s:.2f} s, first event after {first_s:.2f} s")
        for captured, expected in zip(sequences(client, cut), sequences(client, whole), strict=True):
            assert captured["prompt_token_ids"] == expected["prompt_token_ids"]
            assert captured["token_ids"] == expected["token_ids"]
            assert captured["logprobs"] == pytest.approx(expected["logprobs"], abs=logprob_tolerance)
            assert captured["weight_versions"] == expected["weight_versions"]
        wait_for_another(client, before)
