"""Rollouts from the ingress to the disk: real routes, router, fronts and store; only the engine is a fake."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from app.client import calls
from app.client.connection import AsyncFleetClient
from app.http.auth import Guard
from app.http.ingress import build_app
from app.settings.security import Tokens, TokenSource
from deployments.calls.http_server import HttpServer
from deployments.protocol.responses import RunPosition
from deployments.protocol.rollouts import RolloutLimits
from deployments.rollouts.store import Rollouts
from deployments.router.forwarding import RouterLimits
from deployments.router.router import Router
from tests.app.http.fake_controller import Handle
from tests.deployments.routed_fleet import Fleet

NAMES = ("operator", "ann", "bob")
OPERATOR, ANN, BOB = ({"authorization": f"Bearer {name * 8}"} for name in NAMES)
CHAT = "/v1/chat/completions"
NOTHING = {"step": None, "ready_groups": 0, "groups": [], "left_groups": 0}
LIMITS = RolloutLimits(max_rollouts=9, max_gib=1.0, keep_s=60)


class Controller:
    """The controller's port, as far as rollouts."""

    def __init__(self, directory: Path) -> None:
        self.store = Rollouts(directory, LIMITS, "fleet")
        self.version = 7
        self.calls: list[str] = []
        self.attempts: list[int] = []

    async def rollouts(self, name: str, *arguments: Any) -> Any:
        self.calls.append(name)
        if name == "append":
            self.attempts += [captured.attempt for _, captured in arguments[1]]
        return await self.store.call(name, {"": self.version}, *arguments)


class Scene:
    """A fleet of two replicas that captures, and its client."""

    def __init__(self, controller: Controller, client: httpx.AsyncClient, fleet: Fleet) -> None:
        self.controller, self.client, self.fleet = controller, client, fleet

    async def chat(
        self, rollout: str, prompt: list[int], answer: list[int], who: Any = OPERATOR, **options: Any
    ) -> httpx.Response:
        names = {
            "group": "x-rollout-group",
            "size": "x-rollout-group-size",
            "continues": "x-rollout-continue",
        }
        headers = {names[name]: str(options.pop(name)) for name in names if name in options}
        headers |= {"x-rollout-id": rollout, **who}
        body = {"prompt": prompt, "answer": answer, **options}
        return await self.client.post(CHAT, json=body, headers=headers)

    async def post(self, path: str, who: Any = OPERATOR, **body: Any) -> httpx.Response:
        content = json.dumps(body)  # which writes NaN
        return await self.client.post(f"/rollouts/{path}", content=content, headers=who)

    async def take(self, step: str = "step", **body: Any) -> dict[str, Any]:
        answer = await self.post("take", step=step, **body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@asynccontextmanager
async def serving(directory: Path, replicas: str = "ab") -> AsyncIterator[Scene]:
    controller, fleet = Controller(directory), Fleet()
    fleet.rollouts = controller.rollouts
    servers = [await fleet.add(name) for name in replicas]
    most = RouterLimits(max_ongoing_requests=8, max_body_bytes=9999, request_timeout_s=1.0)
    router = Router(fleet, most)  # type: ignore[arg-type]
    handle: Any = Handle(controller)
    operator, *users = (name * 8 for name in NAMES)
    guard = Guard(Tokens(operator=TokenSource(tokens=(operator,)), user=TokenSource(tokens=tuple(users))))
    app = build_app(guard, router, handle, scrape=router.metrics)
    front = HttpServer(app, "127.0.0.1")  # type: ignore[arg-type]
    try:
        async with httpx.AsyncClient(base_url=f"http://{front.address}", timeout=10, verify=False) as client:
            yield Scene(controller, client, fleet)
    finally:
        await router.close()
        for each in (front, *servers):
            await each.close()
        await controller.store.aclose()


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with serving(tmp_path) as made:
        yield made


def refused(answer: httpx.Response, status: int, says: str) -> None:
    assert answer.status_code == status, answer.text
    assert says in answer.json()["error"]["message"]


async def test_a_call_that_openais_client_sends_again_is_one_turn(scene: Scene) -> None:
    """As `docs/guides/agents.md` has it."""

    class Losing(httpx.AsyncHTTPTransport):
        answers = 0

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            answer = await super().handle_async_request(request)
            await answer.aread()
            self.answers += 1
            if self.answers == 1:
                raise httpx.ReadError("the connection was lost", request=request)
            return answer

    losing = Losing()
    async with httpx.AsyncClient(transport=losing) as transport:
        base = f"{scene.client.base_url}/t/a/v1"
        agent = openai.AsyncOpenAI(base_url=base, api_key=NAMES[0] * 8, http_client=transport)
        agent._idempotency_header = "x-rollout-turn"
        for prompt, answer in (([1, 2], [3, 4]), ([1, 2], [5])):
            body = {"prompt": prompt, "answer": answer}
            await agent.chat.completions.create(model="m", messages=[], extra_body=body)
    assert losing.answers == 3
    await scene.post("a/reward", reward=1)
    ((rollout,),) = (group["rollouts"] for group in (await scene.take())["groups"])
    assert [each["token_ids"] for each in rollout["sequences"]] == [[3, 4], [5]]


async def test_an_agent_is_learned_from(scene: Scene) -> None:
    first = await scene.chat("a", [1, 2], [3, 4])
    assert first.json()["choices"] == [{"index": 0, "text": "[3, 4]", "logprobs": False}]
    streamed = await scene.chat("a", [1, 2, 3, 4, 5], [6, 7], stream=True)
    events = [json.loads(event[len("data: ") :]) for event in streamed.text.split("\n\n")[:2]]
    assert [each["choices"][0]["text"] for each in events] == ["[6]", "[7]"]
    assert await scene.take() == {**NOTHING, "stale_groups": 0}
    assert (await scene.post("a/reward", reward=1)).json() == {"status": "rewarded"}
    assert (await scene.post("a/reward", reward=1)).status_code == 200
    taken = await scene.take(max_staleness=0)
    ((rollout,),) = (group["rollouts"] for group in taken["groups"])
    (sequence,) = rollout["sequences"]
    assert (sequence["prompt_token_ids"], sequence["token_ids"]) == ([1, 2], [3, 4, 5, 6, 7])
    assert sequence["loss_mask"] == [True, True, False, True, True]
    assert sequence["logprobs"] == [-3.0, -4.0, 0.0, -6.0, -7.0]
    assert sequence["weight_versions"][1] == {"version": 7, "start": 3, "end": 5}
    assert await scene.take() == taken
    counts = (await scene.client.get("/rollouts", headers=OPERATOR)).json()
    assert counts["states"]["consumed"] == 1 and counts["ends"] == {"consumed": 1}
    refused(await scene.post("a/reward", reward=2), 409, "'a' is consumed")
    for options in ({}, {"stream": True}, {"stream": True, "opens": 2}):  # and events before its first token
        refused(await scene.chat("a", [1], [2], **options), 409, "'a' is consumed")
    assert (await scene.take("another"))["groups"] == []


async def test_a_job_knows_what_became_of_each_of_its_groups(scene: Scene) -> None:
    scene.client.headers.update(OPERATOR)
    send = AsyncFleetClient(scene.client).send
    for number in range(3):
        await send(calls.begin_groups("r", number, 1))
    for rollout in ("a", "b"):
        await scene.chat(rollout, [1], [2], group="r.0")
    first = {"group": "r.0", "rollouts": [{"id": "a", "reward": 0.5, "info": "text"}]}
    last = {"group": "r.2", "rollouts": [], "reason": "unanswered"}
    unknown = await scene.post("settle", groups=[last, {"group": "r.9", "rollouts": []}])
    refused(unknown, 404, "group 'r.9' is unknown")
    for groups in ([first], [first, last]):
        await send(calls.settle_groups(groups))
    where = await send(calls.run_position("r"))
    assert where == RunPosition(next=3, open=["r.1"], ready=1, ends={"unanswered": 1})
    taken = await send(calls.take("r/1", "r", 1, 0))
    assert (taken.step, taken.stale_groups, taken.ready_groups) == ("r/1", 0, 0)
    ((rollout,),) = (group.rollouts for group in taken.groups)
    assert (rollout.id, rollout.reward, rollout.info) == ("a", 0.5, "text")
    assert rollout.sequences[0]["token_ids"] == [2]
    refused(await scene.post("begin", run="r/s", number=0), 400, "run")


async def test_a_request_without_the_header_asks_the_controller_nothing(scene: Scene) -> None:
    spoofed = {"x-slipstream-turn": ",r,1,a", **OPERATOR}
    body = {"prompt": [1], "answer": [2]}
    assert (await scene.client.post(CHAT, json=body, headers=spoofed)).status_code == 200
    assert scene.controller.calls == []


async def test_an_agent_may_have_its_id_in_its_base_url(scene: Scene) -> None:
    body = {"prompt": [1], "answer": [2]}
    for path, status in ((f"/t/a{CHAT}", 200), (f"/t/a b{CHAT}", 400), ("/t/a/v1/nothing", 404)):
        assert (await scene.client.post(path, json=body, headers=OPERATOR)).status_code == status
        assert (await scene.client.post(path, json=body)).status_code == 401
    twice = await scene.client.post(f"/t/a{CHAT}", json=body, headers={"x-rollout-id": "a", **OPERATOR})
    refused(twice, 400, "x-rollout-id must come once")
    for path in ("/inference/v1/generate", "/tokenize"):  # clients go up from a base URL that ends with /v1
        passed = await scene.client.post(f"/t/a{path}", json=body, headers=OPERATOR)
        assert "no route of this fleet" not in passed.text
    assert (await scene.post("a/reward", reward=[1.0])).status_code == 200


async def test_the_base_url_may_have_the_group_too(scene: Scene) -> None:
    for number in range(2):
        path = f"/g/task/2/t/task.{number}{CHAT}"
        answer = await scene.client.post(path, json={"prompt": [1], "answer": [2]}, headers=OPERATOR)
        assert answer.status_code == 200, answer.text
        assert (await scene.take(f"early-{number}"))["groups"] == []
        await scene.post(f"task.{number}/reward", reward=number)
    (group,) = (await scene.take())["groups"]
    assert [each["id"] for each in group["rollouts"]] == ["task.0", "task.1"]


async def test_the_header_means_nothing_where_nothing_is_generated(scene: Scene) -> None:
    """Agents send it with each of their requests."""
    for path in ("/v1/messages/count_tokens", "/tokenize", "/v1/responses/resp_1/cancel"):
        answer = await scene.client.post(path, json={}, headers={"x-rollout-id": "a", **OPERATOR})
        assert "x-rollout-id" not in answer.text
    assert scene.controller.calls == []


async def test_nothing_is_opened_without_a_token(scene: Scene) -> None:
    for method, status in (("POST", 401), ("OPTIONS", 405)):
        answer = await scene.client.request(method, CHAT, headers={"x-rollout-id": "a"})
        assert answer.status_code == status
    assert scene.controller.calls == []


async def test_an_answer_that_no_client_got_is_replaced(scene: Scene) -> None:
    """Replicas record their answers and are lost before they send them: the last one's is kept."""
    answer = await scene.chat("a", [1], [2], dies=True)
    assert answer.status_code == 422, answer.text
    assert scene.controller.calls == ["open", "append"] * 2
    first, last = scene.controller.attempts
    assert 0 < first < last
    assert (await scene.post("a/reward", reward=[1.0])).status_code == 200
    ((rollout,),) = (group["rollouts"] for group in (await scene.take())["groups"])
    assert [each["token_ids"] for each in rollout["sequences"]] == [[2]]


async def test_a_users_token_opens_what_it_began(scene: Scene) -> None:
    assert (await scene.chat("a", [1], [2], ANN, group="g", size=2)).status_code == 200
    for answer in (
        await scene.chat("a", [1], [2], BOB),
        await scene.chat("b", [1], [2], BOB, group="g"),
        await scene.post("a/reward", BOB, reward=1),
        await scene.post("a/discard", BOB),
    ):
        refused(answer, 409, "begun with another token")
    assert (await scene.post("a/reward", ANN, reward=1)).status_code == 200
    for method, path in (("POST", "/take"), ("POST", "/begin"), ("POST", "/settle"), ("GET", "")):
        answer = await scene.client.request(method, f"/rollouts{path}", headers=ANN)
        refused(answer, 403, "needs the operator's token")


async def test_a_user_with_too_many_rollouts_is_told_how_many_and_others_go_on(scene: Scene) -> None:
    for number in range(4):
        answer = await scene.chat(f"a{number}", [1], [2], ANN)
    refused(answer, 429, "expected at most 3 that are open or wait for a trainer")
    assert answer.json()["error"]["type"] == "over_quota"
    for who in (BOB, OPERATOR):
        assert (await scene.chat(who["authorization"][-3:], [1], [2], who)).status_code == 200
    assert (await scene.chat("a0", [1, 2], [3], ANN)).status_code == 200
    assert (await scene.post("a0/reward", ANN, reward=1)).status_code == 200


async def test_a_group_is_ready_when_its_last_member_is_settled(scene: Scene) -> None:
    assert (await scene.chat("a,b", [1], [2], group="g", size=2, n=2)).status_code == 200
    await scene.post("a/reward", reward=[[0.5]])
    assert (await scene.take())["groups"] == []
    assert (await scene.post("b/discard")).json() == {"status": "discarded"}
    (group,) = (await scene.take())["groups"]
    assert [(each["id"], each["reward"]) for each in group["rollouts"]] == [("a", [[0.5]])]


async def test_stale_groups_are_discarded_and_counted(scene: Scene) -> None:
    await scene.chat("a", [1], [2])
    await scene.post("a/reward", reward=1)
    scene.controller.version = 9
    none = {**NOTHING, "stale_groups": 1}
    assert await scene.take(max_staleness=1) == none


async def test_bad_input(scene: Scene) -> None:
    refused(await scene.chat("a/b", [1], [2]), 400, "x-rollout-id: expected 1 to 128 letters")
    refused(await scene.chat("a", [1], [2], group="g h"), 400, "x-rollout-group: expected 1 to 128 letters")
    refused(
        await scene.chat("a", [1], [2], group="g", size=1.5), 400, "x-rollout-group-size must be a number"
    )
    refused(await scene.chat("a", [1], [2], continues=0), 400, "x-rollout-continue must be true or false")
    headers = [("x-rollout-id", "a"), ("x-rollout-id", "b"), *OPERATOR.items()]
    refused(await scene.client.post(CHAT, json={}, headers=headers), 400, "must come once")
    refused(await scene.chat("a,b,a", [1], [2]), 400, "another id for each choice, got 'a,b,a'")
    refused(await scene.chat("b,c", [1], [2], n=3), 400, "or one for each choice, got 2 for 3 choices")
    refused(await scene.chat("..", [1], [2]), 400, "x-rollout-id: expected 1 to 128 letters")
    named = {"x-rollout-id": "a", **OPERATOR}
    batch = await scene.client.post(f"{CHAT}/batch", json={}, headers=named)
    refused(batch, 400, "expected a request to one of")
    refused(await scene.post("a/reward", reward=1), 404, "'a' is unknown")
    assert (await scene.chat("a", [1], [2])).status_code == 200
    for reward in (float("nan"), "1", [1.0, 2.0], [[1.0, 2.0]], None):
        assert (await scene.post("a/reward", reward=reward)).status_code == 400
    for body in ({"groups": 0}, {"max_staleness": -1}, {"step": ""}, {"run": "a b"}):
        assert (await scene.post("take", **{"step": "s", **body})).status_code == 400


async def test_on_a_full_disk_only_captured_requests_fail(scene: Scene) -> None:
    store: Any = scene.controller.store._store
    assert (await scene.chat("a", [1], [2])).status_code == 200
    (store._max_pages,) = store._db.execute("PRAGMA page_count").fetchone()
    prompt, answer = [1] * 900, [2] * 90
    refused(await scene.chat("a", prompt, answer), 503, "rollouts cannot be recorded")
    streamed = await scene.chat("a", prompt, answer, stream=True)
    error = json.loads(streamed.text.split("\n\n")[-3].removeprefix("data: "))["error"]
    assert error["type"] == "fleet_unavailable" and "rollouts cannot be recorded" in error["message"]
    plain = await scene.client.post(CHAT, json={"prompt": [1], "answer": [2]}, headers=OPERATOR)
    assert plain.status_code == 200
    store._max_pages = 99999
    assert (await scene.chat("a", prompt, answer[:80])).status_code == 200
