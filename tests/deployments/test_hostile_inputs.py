"""Numbers, texts and sizes that do not fit, through routes, controller, members and staging: no fence."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.http.route import GuardedRoute
from tests.app.http.serving import application
from tests.deployments.controller_in_process import ControllerInProcess
from tests.deployments.staged_fleet import StagedFleet, staged_fleet
from tests.deployments.weights.transports.vllm_trainer import vllm_without_a_gpu

HUGE = 10**30 + 1  # transformers writes such a number for "no limit"
DEEP: Any = 0
for _ in range(100):
    DEEP = [DEEP]
HOSTILE = [
    *(HUGE, -HUGE, 2**63, 2**64, -1, 0, 1.5, float("nan"), float("inf"), True, None),
    *("", "\0", "²", "../../etc", "x" * 100_000, "\ud800", "__class__", "float99"),
    *([], {}, [HUGE], {"": {}}, {"a": HUGE}, DEEP, [[]]),
]
ANSWERED_BY_VLLM = ("/abort_requests", "/weight_checker")  # and not by the fake replicas
FILES = ("config.json", "tokenizer_config.json", "generation_config.json", "model.safetensors.index.json")
DESCRIBED = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2, 3]]}
PLACES: dict[str, Callable[[Any], Any]] = {
    "all of it": lambda value: value,
    "for each worker": lambda value: [DESCRIBED, value],
    "an unknown field": lambda value: DESCRIBED | {"config": {"model_max_length": value}},
    "handles": lambda value: DESCRIBED | {"ipc_handles": value},
    "pickled handles": lambda value: DESCRIBED | {"ipc_handles_pickled": value},
    "sizes": lambda value: DESCRIBED | {"tensor_sizes": value, "packed": value},
    "names": lambda value: DESCRIBED | {"names": [value]},
    "dtypes": lambda value: DESCRIBED | {"dtype_names": [value]},
    "a shape": lambda value: DESCRIBED | {"shapes": [[value]]},
}

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _without_a_gpu() -> Iterator[None]:
    with vllm_without_a_gpu():
        yield


async def ask(fleet: StagedFleet, path: str, /, **body: Any) -> int:
    return judged(await fleet.http.post(path, content=json.dumps(body)), body)


def judged(answer: httpx.Response, sent: object) -> int:
    """The status; an answer of 400 and above has a sentence, and is nobody's bug."""
    what = f"{answer.request.url} {sent!r:.200}: {answer.status_code} {answer.text[:300]}"
    assert answer.status_code < 500 and "internal_error" not in answer.text, what
    assert answer.status_code < 400 or answer.json()["error"]["message"], what
    return answer.status_code


async def serves(fleet: StagedFleet, version: int) -> None:
    """All replicas take the next version."""
    assert await ask(fleet, "/fleet/publish", path=str(fleet.checkpoint)) == 200
    status = await fleet.controller.fleet()
    assert [(each.state, each.version) for each in status.members] == [("serving", version)] * 2


@pytest.mark.parametrize("place", PLACES)
async def test_no_payload_fences_a_replica(place: str, tmp_path: Path) -> None:
    async with staged_fleet(tmp_path, "ipc", "a", "b") as fleet:
        for value in HOSTILE:
            assert await ask(fleet, "/init_weight_transfer_engine", init_info={}) == 200
            assert await ask(fleet, "/start_weight_update") == 200
            assert await ask(fleet, "/update_weights", update_info=PLACES[place](value)) >= 400, value
            await ask(fleet, "/finish_weight_update", weight_version=value)
            assert await ask(fleet, "/finish_weight_update") >= 400, "what was sent is no version"
        await serves(fleet, 1)


async def test_no_connection_fences_a_replica(tmp_path: Path) -> None:
    async with staged_fleet(tmp_path, "ipc", "a", "b") as fleet:
        for value in HOSTILE:
            await ask(fleet, "/init_weight_transfer_engine", init_info=value)
            await ask(fleet, "/init_weight_transfer_engine", init_info={"a": value})
            await ask(fleet, "/init_weight_transfer_engine", init_info={"rank_offset": value})
            await ask(
                fleet, "/init_weight_transfer_engine", init_info={"rank_offset": 1, "world_size": value}
            )
        await serves(fleet, 1)


async def test_no_file_of_a_directory_fences_a_replica(tmp_path: Path) -> None:
    async with staged_fleet(tmp_path, "ipc", "a", "b") as fleet:
        version = 0
        for number, value in enumerate(HOSTILE):
            text = json.dumps(value)
            for name in FILES:
                directory = tmp_path / f"{number} {name}"
                directory.mkdir()
                for file in fleet.checkpoint.iterdir():
                    (directory / file.name).write_bytes(file.read_bytes())
                (directory / name).write_text(f'{{"weight_map": {text}, "model_max_length": {text}}}')
                version += await ask(fleet, "/fleet/publish", path=str(directory)) == 200
        await serves(fleet, version + 1)


async def test_no_field_of_a_body_is_too_much_for_the_controller(tmp_path: Path) -> None:
    controller = ControllerInProcess(tmp_path, replicas=2)
    app = application(controller, allow_pickled_ipc=True, checkpoint_roots=[tmp_path])
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as client:
        ours = [route for route in app.routes if isinstance(route, GuardedRoute)]
        for route in ours:
            if route.body_field is None or route.path in ANSWERED_BY_VLLM:
                continue
            for sent in HOSTILE + [{name: value} for name in route.body_fields for value in HOSTILE]:
                judged(await client.post(route.path, content=json.dumps(sent)), sent)
    assert [each.state for each in controller.status.members] == ["serving"] * 2
    controller.restart()
    assert [each.state for each in controller.status.members] == ["serving"] * 2, "what it wrote can be read"
    controller.close()
