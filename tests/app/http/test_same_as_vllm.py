"""vLLM's RL routes, asked of vLLM's own routers and of ours: the same answers and orders to the engine.

vLLM's routers run in this process, over an engine client that records what reaches it. What differs on
purpose is listed with its reason.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import JsonValue
from vllm.entrypoints.rl.online.api_router import router as rl_router
from vllm.entrypoints.serve.dev.cache.api_router import router as cache_router
from vllm.entrypoints.serve.dev.sleep.api_router import router as sleep_router
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.v1.engine.async_llm import AsyncLLM

from deployments.protocol import engine_state
from deployments.protocol.passed_routes import REFUSED
from tests.app.http.fake_controller import FakeController

ORDERS = {  # by the controller's method: an engine's, and which argument it has
    "connect": ("init", 1),
    "disconnect": ("shutdown", None),
    "open_round": ("start", None),
    "send": ("update", 2),
    "close_round": ("finish", 2),
    "set_label": ("label", 0),
}
Orders = list[tuple[str, Any]]  # what reached an engine: the method, and its arguments


class RecordingEngine(AsyncLLM):
    """An engine client without an engine, whose two requests run; `/abort_requests` wants an AsyncLLM."""

    def __init__(self) -> None:
        self.orders: Orders = []
        self.output_processor = SimpleNamespace(  # type: ignore[assignment]
            request_states={"a-1": None, "b-2": None}, parent_requests={}
        )
        parallel = SimpleNamespace(world_size=2, world_size_across_dp=2)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)  # type: ignore[assignment]

    def __del__(self) -> None:
        pass

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:  # type: ignore[override]
        self.orders.append(("pause", (mode, clear_cache)))

    async def resume_generation(self) -> None:
        self.orders.append(("resume", None))

    async def is_paused(self) -> bool:
        self.orders.append(("is_paused", None))
        return True

    async def abort(self, request_ids: Any, internal: bool = False) -> None:
        self.orders.append(("abort_requests", None if internal else tuple(request_ids)))

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.orders.append(("sleep", (level, mode)))

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        self.orders.append(("wake_up", None if tags is None else tuple(tags)))
        return True

    async def is_sleeping(self) -> bool:
        self.orders.append(("is_sleeping", None))
        return True

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        self.orders.append(("reset_prefix_cache", (reset_running_requests, reset_connector)))
        return True

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.orders.append(("init", request.init_info))

    async def shutdown_weight_transfer_engine(self) -> None:
        self.orders.append(("shutdown", None))

    async def start_weight_update(self) -> None:
        self.orders.append(("start", None))

    async def update_weights(self, request: Any) -> None:
        self.orders.append(("update", request.update_info))

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.orders.append(("finish", weight_version))

    async def update_weight_version(self, new_version: str) -> None:
        self.orders.append(("label", new_version))

    async def get_weight_version(self) -> str:
        return "3"

    async def compute_weight_checksums(self) -> list[dict[str, str]]:
        self.orders.append(("weight_checker", None))
        return [{"w": "aa"}]


class RecordingController(FakeController):
    """A fleet of one replica, and the orders that reached it."""

    def __init__(self) -> None:
        super().__init__(replicas=1)
        self.orders: Orders = []

    async def call(self, operation: engine_state.Operation) -> dict[str, JsonValue]:
        answers = await super().call(operation)
        self.orders.append((operation.name, _arguments(operation)))
        return answers

    def _ask(self, name: str, *args: Any, **options: Any) -> Any:
        if name in ORDERS:
            order, place = ORDERS[name]
            self.orders.append((order, None if place is None else args[place]))
        return super()._ask(name, *args, **options)


def _arguments(operation: engine_state.Operation) -> Any:
    match operation:
        case engine_state.Pause():
            return operation.mode.value, operation.clear_cache
        case engine_state.Sleep():
            return operation.level, operation.mode.value
        case engine_state.WakeUp():
            return None if operation.tags is None else tuple(tag.value for tag in operation.tags)
        case engine_state.ResetPrefixCache():
            return operation.reset_running_requests, operation.reset_connector
        case engine_state.AbortRequests():
            return operation.request_ids or None
    assert isinstance(
        operation,
        engine_state.Resume | engine_state.IsPaused | engine_state.IsSleeping | engine_state.WeightChecksums,
    )
    return None


ROUTERS = (rl_router, sleep_router, cache_router)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request; `first`: what a server of ours has to be asked before, because it knows the order."""

    method: str
    path: str
    body: Any = None
    first: tuple["Ask", ...] = field(default=())

    async def send(self, client: httpx.AsyncClient) -> httpx.Response:
        return await client.request(self.method, self.path, json=self.body)


def get(path: str) -> Ask:
    return Ask(method="GET", path=path)


def post(path: str, body: Any = None, *first: Ask) -> Ask:
    return Ask(method="POST", path=path, body=body, first=first)


INIT = {"master_address": "10.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3, "packed": True}
UPDATE = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2, 2]]}
START = post("/start_weight_update")
SENT = START, post("/update_weights", {"update_info": UPDATE})

SAME = [
    post("/pause"),
    post("/pause?mode=keep&clear_cache=false"),
    post("/pause?mode=wait&clear_cache=0"),
    post("/pause?mode=abort&clear_cache=yes"),
    post("/pause?clear_cache=True&unknown=1"),
    post("/pause?mode=nap"),
    post("/pause?clear_cache=soon"),
    post("/pause?mode="),
    post("/resume"),
    get("/is_paused"),
    post("/abort_requests", {}),
    post("/abort_requests", {"request_ids": None}),
    post("/abort_requests", {"request_ids": []}),
    post("/abort_requests", {"request_ids": ["a", "b", "c"]}),
    post("/abort_requests", ["a"]),
    post("/sleep"),
    post("/sleep?level=2&mode=keep"),
    post("/sleep?level=0&mode=wait&tags=weights"),
    post("/sleep?level=3"),
    post("/sleep?level=-1"),
    post("/sleep?level=deep"),
    post("/sleep?mode=nap"),
    post("/wake_up"),
    post("/wake_up?tags=weights"),
    post("/wake_up?tags=kv_cache&tags=weights"),
    post("/wake_up?tags=scheduling"),
    get("/is_sleeping"),
    post("/reset_prefix_cache"),
    post("/reset_prefix_cache?reset_running_requests=true"),
    post("/reset_prefix_cache?reset_external=on&reset_running_requests=f"),
    post("/reset_prefix_cache?reset_external=maybe"),
    post("/init_weight_transfer_engine", {"init_info": INIT}),
    post("/init_weight_transfer_engine", {"init_info": {}, "other": 1}),
    post("/init_weight_transfer_engine", {}),
    post("/init_weight_transfer_engine", {"init_info": [1]}),
    post("/init_weight_transfer_engine"),
    post("/shutdown_weight_transfer_engine"),
    START,
    post("/start_weight_update", {"is_checkpoint_format": True}),  # TRL
    post("/update_weights", {"update_info": UPDATE}, START),
    post("/update_weights", {"update_info": [UPDATE, UPDATE]}, START),
    post("/update_weights", {"update_info": "all"}, START),
    post("/update_weights", {}, START),
    post("/finish_weight_update", None, *SENT),
    post("/finish_weight_update", {}, *SENT),
    post("/finish_weight_update", {"weight_version": None}, *SENT),
    post("/finish_weight_update", {"weight_version": "step-7"}, *SENT),
    post("/finish_weight_update", {"weight_version": 7}, *SENT),
    post("/update_weight_version", {"new_version": "step-8"}),
    post("/update_weight_version", {"new_version": 8}),
    post("/update_weight_version", {}),
    get("/weight_info"),
    post("/weight_checker", {"action": "checksum"}),
    post("/weight_checker", {"action": "compare", "baseline": {"w": "aa"}}),
    post("/weight_checker", {"action": "compare", "baseline": {"w": "bb", "v": "cc"}}),
    post("/weight_checker", {"action": "compare"}),
    post("/weight_checker", {"action": "forget"}),
    post("/weight_checker", {}),
    get("/get_world_size"),
    get("/get_world_size?include_dp=false"),
    get("/get_world_size?include_dp=perhaps"),
]


class Why(StrEnum):
    """Why an answer of ours is another one than vLLM's."""

    EMPTY = "an empty body is an empty object on every route of ours"
    TYPED = "vLLM takes a text for a list of its letters"
    NOISE = "a fleet computes with no weights that no round brought"
    TAG = "vLLM does nothing for a tag that it does not know, and says so in its log"
    ONCE = "a tag that is repeated is an error in vLLM's bookkeeping"
    BODY = "SkyRL's flags come in a body, which vLLM 0.32 does not read"


DIFFERENT = {
    "empty abort": (post("/abort_requests"), 400, 200, Why.EMPTY),
    "text of ids": (post("/abort_requests", {"request_ids": "ab"}), 200, 400, Why.TYPED),
    "unknown tag": (post("/wake_up?tags=weigths"), 200, 400, Why.TAG),
    "repeated tag": (post("/wake_up?tags=weights&tags=weights"), 200, 200, Why.ONCE),
    "a level in a body": (post("/sleep", {"level": 3}), 200, 400, Why.BODY),
    "flags in a body": (post("/reset_prefix_cache", {"reset_running_requests": True}), 200, 200, Why.BODY),
}


@pytest.fixture
def engine() -> RecordingEngine:
    return RecordingEngine()


@cache
def vllms_application() -> FastAPI:
    app = FastAPI()
    for router in ROUTERS:
        app.include_router(router)
    app.state.args = SimpleNamespace(log_error_stack=False)
    init_exception_handler(app)
    return app


@pytest.fixture
async def theirs(engine: RecordingEngine) -> AsyncIterator[httpx.AsyncClient]:
    app = vllms_application()
    app.state.engine_client = engine
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as made:
        yield made


@pytest.fixture
def controller() -> RecordingController:
    return RecordingController()


@pytest.mark.parametrize("ask", SAME, ids=lambda ask: f"{ask.path} {ask.body}")
async def test_fleet_answers_what_vllm_answers(
    ask: Ask,
    theirs: httpx.AsyncClient,
    engine: RecordingEngine,
    fleet: httpx.AsyncClient,
    controller: RecordingController,
) -> None:
    for each in ask.first:
        assert (await each.send(theirs)).status_code == (await each.send(fleet)).status_code == 200
    expected, actual = await ask.send(theirs), await ask.send(fleet)
    assert actual.status_code == expected.status_code, (expected.text, actual.text)
    assert controller.orders == engine.orders
    if expected.status_code == 200:
        assert actual.json() == expected.json()
        assert actual.headers["content-type"] == expected.headers["content-type"]
    else:
        assert expected.status_code == 400 and actual.json()["error"]["type"] == "invalid_request"


@pytest.mark.parametrize("name", DIFFERENT)
async def test_differences_from_vllm_have_a_reason(
    name: str, theirs: httpx.AsyncClient, fleet: httpx.AsyncClient
) -> None:
    ask, of_vllm, of_ours, _ = DIFFERENT[name]
    assert ((await ask.send(theirs)).status_code, (await ask.send(fleet)).status_code) == (of_vllm, of_ours)


async def test_weights_that_no_round_brought_are_refused(
    fleet: httpx.AsyncClient, controller: RecordingController
) -> None:
    answer = await fleet.post("/weight_checker", json={"action": "reset"})
    assert answer.status_code == 400 and "checksum" in answer.json()["error"]["message"], Why.NOISE
    assert controller.orders == []


def test_every_route_of_these_routers_is_compared_or_refused() -> None:
    routes = {
        (method, route.path)
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    compared = {(ask.method, ask.path.partition("?")[0]) for ask in SAME}
    assert {path for method, path in routes - compared} <= REFUSED.keys()
    assert compared <= routes
