"""vLLM's routes that update weights: the lease of callers who carry none, parameters, refusals."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from app.http.lease import PUBLISHER
from app.http.requests import UpdateWeightsBody
from app.http.weight_routes import WeightRoutes, agreed
from deployments.errors import Conflict, InvalidRequest, RoundAborted, StalePublisher, TransferAborted
from deployments.protocol import RoundOptions, WeightChecksums
from tests.app.http.fake_controller import FakeController, Handle
from tests.app.http.serving import client


@pytest.fixture
def controller() -> FakeController:
    return FakeController()


@pytest.fixture
async def fleet(controller: FakeController) -> AsyncIterator[httpx.AsyncClient]:
    async with client(controller) as made:
        yield made


async def test_a_whole_update_takes_the_lease_once_and_gives_it_back(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    answers = [
        await fleet.post("/init_weight_transfer_engine", json={"init_info": {"port": 1}}),
        await fleet.post("/start_weight_update"),
        await fleet.post("/update_weights", json={"update_info": {"segment": "a"}}),
        await fleet.post("/update_weights", json={"update_info": [{"segment": "b"}, {"segment": "c"}]}),
        await fleet.post("/finish_weight_update", json={"weight_version": "step-1"}),
        await fleet.post("/shutdown_weight_transfer_engine"),
    ]
    assert [answer.status_code for answer in answers] == [200] * 6
    assert [answer.json()["message"] for answer in answers] == [
        "Weight transfer initialized",
        "Weight update started",
        "Weights updated",
        "Weights updated",
        "Weight update finished",
        "Weight transfer shut down",
    ]
    assert controller.sent == [{"segment": "a"}, [{"segment": "b"}, {"segment": "c"}]]
    assert controller.options == [RoundOptions(persist=True)], "nobody else stores an outside version"
    assert (controller.version, controller.label) == (4, "step-1")
    assert controller.lease is None


@pytest.mark.parametrize(
    ("path", "body", "round_open"),
    [
        ("/init_weight_transfer_engine", {"init_info": {}}, False),
        ("/start_weight_update", None, False),
        ("/update_weights", {"update_info": {}}, True),
        ("/finish_weight_update", None, True),
        ("/shutdown_weight_transfer_engine", None, False),
    ],
)
async def test_each_call_is_refused_while_another_publisher_holds_the_lease(
    fleet: httpx.AsyncClient, controller: FakeController, path: str, body: object, round_open: bool
) -> None:
    lease = await controller.acquire("trainer")
    if round_open:
        await controller.open_round(lease.token, RoundOptions())
    answer = await fleet.post(path, json=body)
    assert answer.status_code == 409
    assert answer.json()["error"] == {
        "type": "conflict",
        "message": "'trainer' publishes",
        "detail": {"holder": "trainer"},
    }
    assert controller.lease == lease, "the other one keeps it"
    assert (controller.round_id is not None) == round_open


async def test_the_lease_is_held_between_calls_only_while_a_round_is_open(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    await fleet.post("/init_weight_transfer_engine", json={"init_info": {}})
    assert controller.lease is None
    await fleet.post("/start_weight_update")
    held = controller.lease
    assert held is not None and held.publisher == PUBLISHER
    await fleet.post("/update_weights", json={"update_info": {}})
    assert controller.lease == held, "renewed, not acquired again: that would abort the round"
    await fleet.post("/finish_weight_update")
    assert controller.lease is None


@pytest.mark.parametrize(
    ("path", "method", "body"),
    [
        ("/init_weight_transfer_engine", "connect", {"init_info": {}}),
        ("/start_weight_update", "open_round", None),
        ("/shutdown_weight_transfer_engine", "disconnect", None),
    ],
)
async def test_a_call_that_fails_gives_the_lease_back(
    fleet: httpx.AsyncClient, controller: FakeController, path: str, method: str, body: object
) -> None:
    controller.fail_next[method] = InvalidRequest("expected 3 ranks, got 7", {"expected": 3, "actual": 7})
    answer = await fleet.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["detail"] == {"expected": 3, "actual": 7}
    assert controller.lease is None and controller.calls[-1] == "release"


async def test_a_round_that_aborts_gives_the_lease_back(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    await fleet.post("/start_weight_update")
    controller.fail_next["close_round"] = RoundAborted("too few replicas staged")
    answer = await fleet.post("/finish_weight_update")
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "round_aborted")
    assert controller.lease is None
    assert (await fleet.post("/start_weight_update")).status_code == 200


async def test_a_payload_that_is_rejected_leaves_the_round_and_its_lease(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    await fleet.post("/start_weight_update")
    controller.fail_next["send"] = InvalidRequest("expected shape [3], got [4]")
    assert (await fleet.post("/update_weights", json={"update_info": {}})).status_code == 400
    assert controller.lease is not None and controller.round_id == 1
    assert (await fleet.post("/finish_weight_update")).status_code == 200


async def test_a_transfer_that_failed_is_answered_503_with_a_time_to_retry(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    await fleet.post("/start_weight_update")
    controller.fail_next["send"] = TransferAborted("a peer is gone", {"send_again": True})
    answer = await fleet.post("/update_weights", json={"update_info": {}})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["detail"] == {"send_again": True}


async def test_a_long_call_renews_the_lease(controller: FakeController) -> None:
    routes = WeightRoutes(Handle(controller), 1000, allow_pickled_ipc=False, renew_s=0.01)
    await routes.start()
    controller.delay_s["send"] = 0.1
    await routes.update(UpdateWeightsBody(update_info={}))
    assert controller.calls.count("renew") >= 2
    assert controller.sent == [{}]


async def test_a_short_call_does_not_renew(controller: FakeController) -> None:
    routes = WeightRoutes(Handle(controller), 1000, allow_pickled_ipc=False)
    await routes.start()
    await routes.update(UpdateWeightsBody(update_info={}))
    assert "renew" not in controller.calls


async def test_a_lease_that_is_lost_during_a_long_call_ends_it(controller: FakeController) -> None:
    routes = WeightRoutes(Handle(controller), 1000, allow_pickled_ipc=False, renew_s=0.01)
    await routes.start()
    controller.delay_s["send"] = 0.1
    controller.fail_next["renew"] = StalePublisher("token 1 is stale")
    with pytest.raises(StalePublisher):
        await routes.update(UpdateWeightsBody(update_info={}))
    assert controller.sent == []


async def test_the_error_of_a_long_call_is_its_own(controller: FakeController) -> None:
    routes = WeightRoutes(Handle(controller), 1000, allow_pickled_ipc=False, renew_s=0.01)
    await routes.start()
    controller.delay_s["send"] = 0.03
    controller.fail_next["send"] = TransferAborted("a peer is gone")
    with pytest.raises(TransferAborted, match="a peer is gone"):
        await routes.update(UpdateWeightsBody(update_info={}))


async def test_concurrent_calls_of_one_publisher_share_its_lease(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    await fleet.post("/start_weight_update")
    controller.delay_s["send"] = 0.01
    sends = [fleet.post("/update_weights", json={"update_info": {"n": n}}) for n in range(3)]
    assert [answer.status_code for answer in await asyncio.gather(*sends)] == [200] * 3
    assert len(controller.sent) == 3 and controller.lease is not None


# -- order and parameters --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/update_weights", {"update_info": {}}, "update_weights was called before start_weight_update"),
        ("/finish_weight_update", None, "finish_weight_update was called before start_weight_update"),
    ],
)
async def test_a_call_before_the_round_is_a_conflict(
    fleet: httpx.AsyncClient, controller: FakeController, path: str, body: object, message: str
) -> None:
    answer = await fleet.post(path, json=body)
    assert answer.status_code == 409 and message in answer.json()["error"]["message"]
    assert controller.lease is None


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/start_weight_update", None, "start_weight_update was called twice: round 1 is open"),
        ("/init_weight_transfer_engine", {"init_info": {}}, "round 1 is open: finish it"),
        (
            "/shutdown_weight_transfer_engine",
            None,
            "Cannot release a trainer connection during a weight update",
        ),
    ],
)
async def test_a_call_that_a_round_forbids_is_a_conflict_and_the_round_goes_on(
    fleet: httpx.AsyncClient, controller: FakeController, path: str, body: object, message: str
) -> None:
    await fleet.post("/start_weight_update")
    answer = await fleet.post(path, json=body)
    assert answer.status_code == 409 and message in answer.json()["error"]["message"]
    assert controller.round_id == 1 and controller.lease is not None


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("/init_weight_transfer_engine", b"", "expected the field 'init_info', got []"),
        ("/init_weight_transfer_engine", b'{"init_info": [1]}', "init_info: expected an object, got list"),
        ("/update_weights", b"{}", "expected the field 'update_info', got []"),
        ("/update_weights", b'{"update_info": "x"}', "expected an object or a list of objects, got str"),
        ("/update_weights", b'{"update_info": [1]}', "expected an object or a list of objects, got int"),
        (
            "/update_weights",
            b'{"update_info": null}',
            "expected an object or a list of objects, got NoneType",
        ),
        ("/finish_weight_update", b'{"weight_version": 7}', "weight_version: expected a valid string, got 7"),
        ("/update_weight_version", b"{}", "expected the field 'new_version', got []"),
        ("/weight_checker", b'{"action": "reset"}', "action: expected 'checksum' or 'compare', got 'reset'"),
        ("/weight_checker", b'{"action": "compare"}', "baseline: expected an object of checksums"),
        (
            "/weight_checker",
            b'{"action": "compare", "baseline": []}',
            "baseline: expected an object, got list",
        ),
    ],
)
async def test_a_wrong_body_is_refused_before_anything_is_called(
    fleet: httpx.AsyncClient, controller: FakeController, path: str, content: bytes, message: str
) -> None:
    answer = await fleet.post(path, content=content)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request"
    assert message in answer.json()["error"]["message"]
    assert controller.calls == []


@pytest.mark.parametrize("content", [b"", b"{}", b'{"weight_version": null}', b'{"something": 1}'])
async def test_a_round_needs_no_label_and_unknown_fields_are_ignored_as_vllm_does(
    fleet: httpx.AsyncClient, controller: FakeController, content: bytes
) -> None:
    await fleet.post("/start_weight_update", content=b"not even JSON: vLLM does not read this body")
    assert (await fleet.post("/finish_weight_update", content=content)).status_code == 200
    assert controller.label is None


async def test_a_body_that_is_too_large_is_refused(fleet: httpx.AsyncClient) -> None:
    answer = await fleet.post("/update_weights", content=b"x" * 2000)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "payload_too_large")


async def test_pickled_handles_need_the_switch(fleet: httpx.AsyncClient, controller: FakeController) -> None:
    await fleet.post("/start_weight_update")
    answer = await fleet.post("/update_weights", json={"update_info": {"ipc_handles_pickled": "gASVAAAA"}})
    assert answer.status_code == 400
    assert "allow_pickled_ipc_over_http" in answer.json()["error"]["message"]
    assert controller.sent == [] and controller.round_id == 1


async def test_with_the_switch_handles_are_unpickled_and_nothing_else(controller: FakeController) -> None:
    async with client(controller, allow_pickled_ipc=True) as fleet:
        await fleet.post("/start_weight_update")
        good = {"names": ["a"], "ipc_handles_pickled": "gARdlC4="}  # an empty list
        assert (await fleet.post("/update_weights", json={"update_info": good})).status_code == 200
        assert controller.sent == [{"names": ["a"], "ipc_handles": []}]
        evil = {"ipc_handles_pickled": "Y29zCnN5c3RlbQooUydlY2hvJwp0Ui4="}  # os.system('echo')
        answer = await fleet.post("/update_weights", json={"update_info": evil})
        assert answer.status_code == 400 and "os.system" in answer.json()["error"]["message"]


# -- questions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "size"),
    [("", 4), ("?include_dp=true", 4), ("?include_dp=1", 4), ("?include_dp=False", 2), ("?include_dp=0", 2)],
)
async def test_the_world_size_counts_all_workers_or_those_of_one_replica(
    fleet: httpx.AsyncClient, query: str, size: int
) -> None:
    assert (await fleet.get(f"/get_world_size{query}")).json() == {"world_size": size}


async def test_the_world_size_of_no_replicas_is_zero(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    controller.serving = ()
    assert (await fleet.get("/get_world_size?include_dp=false")).json() == {"world_size": 0}


async def test_the_weight_version_is_the_label_or_the_number(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    assert (await fleet.get("/weight_info")).json() == {"weight_version": "3"}
    answer = await fleet.post("/update_weight_version", json={"new_version": "best"})
    assert answer.json() == {"success": True, "new_version": "best"}
    assert (await fleet.get("/weight_info")).json() == {"weight_version": "best"}
    await fleet.post("/update_weight_version", json={"new_version": ""})
    assert (await fleet.get("/weight_info")).json() == {"weight_version": ""}


async def test_checksums_are_those_of_all_workers_and_compare_with_a_baseline(
    fleet: httpx.AsyncClient, controller: FakeController
) -> None:
    controller.checksums = {name: [{"a": "1"}, {"b": "2"}] for name in controller.serving}
    same = {"a": "1", "b": "2"}
    assert (await fleet.post("/weight_checker", json={"action": "checksum"})).json() == {"checksums": same}
    assert controller.operations == [WeightChecksums()]

    async def compare(baseline: dict[str, str]) -> object:
        body = {"action": "compare", "baseline": baseline}
        return (await fleet.post("/weight_checker", json=body)).json()

    assert await compare(same) == {"match": True, "mismatches": []}
    assert await compare({"a": "1", "c": "3"}) == {"match": False, "mismatches": ["b", "c"]}
    assert await compare({}) == {"match": False, "mismatches": ["a", "b"]}


def test_checksums_that_differ_between_replicas_are_named() -> None:
    with pytest.raises(Conflict, match="replicas differ in 1 tensors") as caught:
        agreed({"r0": [{"a": "1", "b": "2"}], "r1": [{"a": "1", "b": "3"}]})
    assert caught.value.detail == {"tensors": ["b"]}
    assert agreed({}) == {}
