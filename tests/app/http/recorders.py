"""An engine and a fleet that record which orders reach them."""

from types import SimpleNamespace
from typing import Any

from pydantic import JsonValue
from vllm.v1.engine.async_llm import AsyncLLM

from deployments.protocol import engine_state
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
