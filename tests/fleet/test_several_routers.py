"""Two routers behind HAProxy, as `make serve` starts them: whichever answers, the answer is the same."""

import math
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.main import STATS_PERIOD_S
from tests.chaos.launching import SETTINGS, Launched, launch
from tests.environment import users_environment
from tests.fleet.session_fleet import MODEL
from tests.fleet.talk import Reference, complete, succeeded
from tests.fleet.test_metrics import by_replica, scraped
from tests.fleet.test_prompt_lists import DETAILS, GREEDY, PROMPTS, SESSION, _rounded, _streamed
from tests.tiny_models import save_tiny_llama

pytestmark = [pytest.mark.serve, pytest.mark.timeout(400)]
ROUTERS = 2
LISTS = 24  # requests at a time
SEEN_S = 60.0  # Ray's processes report to the agent every ten seconds


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    root = tmp_path_factory.mktemp("routers")
    checkpoint = save_tiny_llama(root / "tiny", seed=1)
    served = {"model": str(checkpoint), "served_model_name": MODEL}
    limits = {"num_replicas": ROUTERS, "request_timeout_s": 60}
    settings = {name: value for name, value in SETTINGS.items() if name != "trainer"}
    with launch(root, {**settings, **served, "router": limits}) as fleet:
        wait_for_routers(fleet)
        yield fleet


def wait_for_routers(fleet: Launched) -> None:
    deadline = time.monotonic() + SEEN_S
    while len(fleet.named("router")) < ROUTERS:
        assert time.monotonic() < deadline, "the second router did not start"
        time.sleep(0.5)


def routers_of(fleet: Launched) -> dict[str, float]:
    """The requests that each router has answered, as Serve counts them."""
    with fleet.client() as client:
        found = scraped(client)
    family = found.get("ray_serve_deployment_request_counter", found.get("ray_serve_num_http_requests"))
    return {} if family is None else by_replica(family, "_total", deployment="router")


def until_both_have_answered(fleet: Launched) -> None:
    deadline = time.monotonic() + SEEN_S
    while len([count for count in routers_of(fleet).values() if count]) < ROUTERS:
        assert time.monotonic() < deadline, f"requests were answered by {routers_of(fleet)} alone"
        time.sleep(2)


def at_once(fleet: Launched, path: str, asked: dict[str, Any], count: int = LISTS) -> list[httpx.Response]:
    """The answers to as many equal requests, each over a connection of its own."""

    def post(_: int) -> httpx.Response:
        with fleet.client(120) as client:
            return succeeded(client.post(path, json=asked))

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(post, range(count)))


def alone(fleet: Launched, path: str, asked: dict[str, Any]) -> httpx.Response:
    """The answer of one replica."""
    with fleet.client() as client:
        return succeeded(client.post(path, json=asked, headers=SESSION))


def test_lists_of_prompts_are_divided_and_merged_by_both(launched: Launched) -> None:
    asked = {**GREEDY, **DETAILS}
    expected = _rounded(alone(launched, "/v1/completions", asked).json())
    answers = at_once(launched, "/v1/completions", asked)
    assert [_rounded(answer.json()) for answer in answers] == [expected] * LISTS
    assert [choice["index"] for choice in expected["choices"]] == list(range(len(PROMPTS)))
    until_both_have_answered(launched)
    # How many of the lists are divided while others are answered depends on how far these are. What one
    # router has in flight, the other one learns from the replicas' reports, also that it is done.
    deadline, divided = time.monotonic() + SEEN_S, 0
    while divided < 4:
        assert time.monotonic() < deadline, "nothing else was to do"
        (answer,) = at_once(launched, "/v1/completions", asked, count=1)
        assert _rounded(answer.json()) == expected
        divided = divided + 1 if ", " in answer.headers["x-slipstream-replica"] else 0
        time.sleep(4 * STATS_PERIOD_S)


def test_batches_of_chats_are_divided_and_merged_by_both(launched: Launched) -> None:
    chats = [[{"role": "user", "content": f"say {number}"}] for number in range(10)]
    asked = {"model": MODEL, "messages": chats, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    path = "/v1/chat/completions/batch"
    expected = _rounded(alone(launched, path, asked).json())
    answers = at_once(launched, path, asked)
    assert [_rounded(answer.json()) for answer in answers] == [expected] * LISTS
    assert len(expected["choices"]) == len(chats)
    assert any(", " in answer.headers["x-slipstream-replica"] for answer in answers)


def test_streams_of_lists_are_merged_by_both(launched: Launched) -> None:
    asked = {**GREEDY, "stream": True, "logprobs": 1, "return_token_ids": True}
    asked |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    expected = _streamed(alone(launched, "/v1/completions", asked))
    answers = at_once(launched, "/v1/completions", asked, count=8)
    assert [_streamed(answer) for answer in answers] == [expected] * 8


def test_a_session_has_one_replica_whichever_router_it_comes_to(launched: Launched) -> None:
    def replicas_of(session: str) -> set[str]:
        found = set()
        for _ in range(6):
            with launched.client() as client:  # a connection each: HAProxy chooses a router for it
                found.add(complete(client, max_tokens=2, headers={"x-session-id": session}).replica)
        return found

    def settled() -> bool:
        # Two at a time: a session leaves a replica that has much more to do than the others.
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(replicas_of, [uuid.uuid4().hex for _ in range(12)]))
        return [len(each) for each in found] == [1] * 12 and len(set.union(*found)) == 2

    # What one router has in flight the other one knows as of the replicas' last reports: for as long as these
    # say that a replica is too loaded, sessions leave it. Those of an idle fleet do not.
    deadline = time.monotonic() + SEEN_S
    while not settled():
        assert time.monotonic() < deadline, "sessions change their replica with the router"


def test_rounds_whose_calls_come_to_different_routers_are_committed(launched: Launched) -> None:
    root = launched.state.parent
    other = save_tiny_llama(root / "other", seed=11)
    with launched.client() as client:
        version = client.get("/fleet").json()["committed_version"]
        command = [sys.executable, "-m", "app.scenarios.http_publisher", "--url", launched.url]
        command += ["--model", str(other), "--transport", "shm", "--rounds", "3"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=users_environment())
        assert done.returncode == 0, done.stderr[-4000:]
        assert client.get("/fleet").json()["committed_version"] == version + 3
        assert complete(client).token_ids == Reference(other)([5, 6, 7, 8, 9], 16)


def test_metrics_do_not_depend_on_the_router(launched: Launched) -> None:
    """vLLM's counters come from the replicas and ours from the controller, once each."""

    def figures() -> dict[str, Any]:
        with launched.client() as client:  # a connection each
            text = succeeded(client.get("/metrics")).text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        tokens = by_replica(families["vllm:generation_tokens"], "_total")
        rounds = families["slipstream_rounds"].samples
        return {"tokens": tokens, "rounds": {each.labels["outcome"]: each.value for each in rounds}}

    before = figures()
    assert len(before["tokens"]) == 2
    assert [figures() for _ in range(3 * ROUTERS)] == [before] * (3 * ROUTERS)
    with launched.client() as client:
        rounds = client.get("/fleet/rounds").json()["rounds"]
    assert before["rounds"]["committed"] == len([each for each in rounds if each["phase"] == "committed"])
    answers = at_once(launched, "/v1/completions", dict(GREEDY), count=6)
    after = figures()
    made = sum(answer.json()["usage"]["completion_tokens"] for answer in answers)
    grown = sum(after["tokens"].values()) - sum(before["tokens"].values())
    assert math.isclose(grown, made), "each token is counted once, and by its replica"
    assert after["rounds"] == before["rounds"]
