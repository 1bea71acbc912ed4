import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from app.client import calls
from deployments.protocol.publishing import RoundReport
from deployments.protocol.responses import TrainerStatus
from tests.app.http.fake_controller import FakeController
from tests.app.http.fake_status import report
from tests.app.http.fake_trainer import STATUS, FakeTrainer, adapter_report
from tests.app.http.serving import client

TRAJECTORY = {"prompt_token_ids": [1], "token_ids": [2], "logprobs": [-1.0], "advantage": 1.0}


def to_json(told: RoundReport | TrainerStatus) -> Any:
    return json.loads(json.dumps(asdict(told)))


async def test_steps_publishes_and_saves_reach_the_trainer() -> None:
    trainer = FakeTrainer()
    async with client(FakeController(), trainer=trainer) as fleet:
        step = await fleet.post("/train/step?done=3", json={"trajectories": [TRAJECTORY]})
        late = await fleet.post("/train/step?done=2", json={"trajectories": [TRAJECTORY]})
        answers = [
            step,
            await fleet.post("/train/publish", json={"label": "step 1"}),
            await fleet.post("/train/publish"),
            await fleet.post("/train/save", json={"path": "/data/x"}),
            await fleet.post("/train/save", content=b" "),
            await fleet.get("/train/status"),
        ]
    assert late.status_code == 409 and late.json()["error"]["type"] == "other_step"
    assert [answer.status_code for answer in answers] == [200] * 6
    assert [answer.json() for answer in answers] == [
        {"loss": 0.5},
        to_json(report(2, 4, "step 1")),
        to_json(report(2, 4, None)),
        {"path": "/data/x", "step": 3, "save_s": 0.25},
        {"path": "/tmp/checkpoint", "step": 3, "save_s": 0.25},
        {**to_json(STATUS), "untrained": []},
    ]
    assert trainer.received == [[TRAJECTORY], "step 1", None, "/data/x", None]


async def test_what_a_job_reports_of_a_step_is_among_the_steps() -> None:
    trainer = FakeTrainer()
    told = {"text": "4", "reward": 1.0, "versions": [[3, 5], [4, 2]]}
    body = {"run": "grpo-1", "step": 2, "values": {"reward": 0.5, "loss": None}, "rollouts": [told]}
    async with client(FakeController(), trainer=trainer) as fleet:
        assert (await fleet.post("/train/report", json=body)).json() == {"status": "reported"}
        (step,) = (await fleet.get("/train/steps")).json()["steps"]
        assert step == {**body, "at": 0.0}
        assert (await fleet.get("/train/steps?after=2")).json() == {"steps": []}
        for wrong, message in (
            ({"run": ""}, "run: expected"),
            ({"values": {"reward": "high"}}, "values: expected"),
            ({"values": {"reward": 10**400}}, "values: expected"),
            ({"rollouts": [told] * 17}, "rollouts: expected"),
            ({"rollouts": [told | {"text": "x" * 5000}]}, "rollouts: expected"),
        ):
            refused = await fleet.post("/train/report", json=body | wrong)
            assert refused.status_code == 400 and refused.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize("media_type", ["application/x-safetensors", "Application/X-Safetensors; charset=x"])
async def test_batch_of_arrays_reaches_the_trainer_as_it_is(media_type: str) -> None:
    trainer, headers = FakeTrainer(), {"content-type": media_type}
    async with client(FakeController(), trainer=trainer) as fleet:
        answer = await fleet.post("/train/step", content=b"\x00arrays", headers=headers)
        assert (answer.status_code, trainer.received) == (200, [b"\x00arrays"])
        for wrong in ("text/plain", "application/octet-stream"):
            answer = await fleet.post("/train/step", content=b"\x00", headers={"content-type": wrong})
            assert (answer.status_code, "must be JSON" in answer.text) == (400, True)
        answer = await fleet.post("/train/publish", content=b"\x00", headers=headers)
        assert (answer.status_code, "must be JSON" in answer.text) == (400, True)
        content = (await fleet.get("/openapi.json")).json()["paths"]["/train/step"]["post"]["requestBody"]
    assert set(content["content"]) == {"application/json", "application/x-safetensors"}


async def test_publish_of_an_adapter_answers_with_its_name_and_version() -> None:
    async with client(FakeController(), trainer=FakeTrainer(adapts=True)) as fleet:
        answer = await fleet.post("/train/publish", json={"label": "step 1"})
        assert answer.json() == asdict(adapter_report(5, "step 1"))
        status = (await fleet.get("/train/status")).json()
        assert (status["adapter"], status["adapter_version"], status["last_adapter"]) == ("math", 4, None)
        back = await fleet.post("/fleet/rollback", json={"version": 2})
        assert (back.status_code, "trains the adapter 'math'" in back.text) == (400, True)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/train/step", {"trajectories": {}}, 400, "trajectories: expected a valid list, got dict"),
        ("/train/step", {"trajectories": []}, 400, "trajectories must be a non-empty list"),
        (
            "/train/publish",
            {"after": 3},
            409,
            "version 4 is committed, and these weights continue from version 3",
        ),
        ("/train/publish", {"step": 7}, 409, "expected a trainer after step 7, got one after step 3"),
        ("/train/publish", {"label": "aborts"}, 409, "too few replicas staged"),
        ("/train/save", {"path": ["x"]}, 400, "path: expected a valid string, got list"),
    ],
)
async def test_what_the_trainer_cannot_do_is_refused_with_the_reason(
    path: str, body: object, status: int, message: str
) -> None:
    async with client(FakeController(), trainer=FakeTrainer()) as fleet:
        answer = await fleet.post(path, json=body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


async def test_trajectories_are_checked_by_the_trainer_which_names_them_by_number() -> None:
    trainer = FakeTrainer()
    async with client(FakeController(), trainer=trainer) as fleet:
        assert (await fleet.post("/train/step", content=b'{"trajectories": [{"x": NaN}]}')).status_code == 200
    assert str(trainer.received) == "[[{'x': nan}]]"


async def test_settings_of_a_step_reach_the_trainer_beside_its_trajectories() -> None:
    trainer = FakeTrainer()
    settings = {"learning_rate": 2e-6, "loss": {"name": "dapo"}}
    async with client(FakeController(), trainer=trainer) as fleet:
        body = {"trajectories": [TRAJECTORY], "settings": settings}
        assert (await fleet.post("/train/step", json=body)).json() == {"loss": 0.5}
        schemas = (await fleet.get("/openapi.json")).json()["components"]["schemas"]
    assert trainer.received == [([TRAJECTORY], settings)]
    assert "learning_rate" in json.dumps(schemas["SlipstreamStepBody"]["properties"]["settings"])


async def test_without_a_trainer_every_route_says_so() -> None:
    async with client(FakeController()) as fleet:
        answers = [
            await fleet.post("/train/step", json={"trajectories": []}),
            await fleet.post("/train/publish"),
            await fleet.post("/train/save"),
            await fleet.get("/train/status"),
        ]
    for answer in answers:
        assert answer.status_code == 400
        assert "this fleet has no trainer deployment" in answer.json()["error"]["message"]


async def test_step_whose_loss_is_not_finite_is_answered_with_null() -> None:
    class Diverged(FakeTrainer):
        async def step(self, *given: object) -> dict[str, float]:
            return {"loss": float("nan"), "grad_norm": float("inf"), "skipped": True}

        async def status(self) -> TrainerStatus:
            return replace(STATUS, last_step={"loss": float("nan")})

    async with client(FakeController(), trainer=Diverged()) as fleet:
        step = await fleet.post("/train/step", json={"trajectories": [TRAJECTORY]})
        status = await fleet.get("/train/status")
    assert (step.status_code, step.json()) == (200, {"loss": None, "grad_norm": None, "skipped": True})
    assert status.json()["last_step"] == {"loss": None}
    assert calls.train_status().read(status.content, {}).last_step == {"loss": None}
