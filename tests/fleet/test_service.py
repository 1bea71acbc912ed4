"""The service around the rounds: sessions, admission, disconnects, operations, loss of a replica."""

import json
import time
from dataclasses import asdict

import pytest
from ray import serve

from tests.fleet import talk
from tests.fleet.deployed import Fleet
from tests.fleet.losing import members, process_of
from trainers.trajectory import Trajectory
from trainers.trajectory_arrays import MEDIA_TYPE, to_bytes

pytestmark = [pytest.mark.serve, pytest.mark.fleet("shared"), pytest.mark.timeout(300)]


def test_an_answer_with_a_seed_is_the_same_in_however_many_steps_its_prompt_is_computed(fleet: Fleet) -> None:
    """vLLM's engine died of it (`deployments.replica.cpu_sampling`)."""
    prompt = [10 + index * 7 % 200 for index in range(900)]  # a step of these engines has 256 tokens
    with fleet.client() as client:
        # Steps of other tests may have left weights that give one token its whole probability.
        talk.succeeded(client.post("/fleet/publish", json={"path": str(talk.saved(fleet, 41))}))
        first, again, other = (
            talk.complete(client, prompt, 16, {"x-session-id": "seeded"}, temperature=1.0, seed=seed)
            for seed in (3, 3, 4)
        )
    assert first.token_ids == again.token_ids, "the second time all but the prompt's end is in the cache"
    assert first.token_ids != other.token_ids


def test_weights_that_a_sleep_discarded_are_not_served(fleet: Fleet) -> None:
    with fleet.client() as client:
        assert client.post("/sleep", params={"level": 2}).status_code == 200
        for query in ("", "?tags=kv_cache", "?tags=weights&tags=kv_cache"):
            refused = client.post(f"/wake_up{query}")
            assert refused.status_code == 409, query
            error = refused.json()["error"]
            assert error["type"] == "conflict" and "wake_up?tags=weights" in error["message"]
        assert client.post("/train/publish", json={}).status_code == 409
        assert client.post("/wake_up?tags=weights&tags=weights").status_code == 200
        assert client.post("/wake_up").status_code == 409
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        published = talk.trainer_publishes(client)
        assert published.status_code == 200, published.text
        assert client.post("/wake_up?tags=kv_cache").status_code == 200
        assert client.get("/is_sleeping").json() == {"is_sleeping": False}
        for answer in talk.on_every_replica(client, max_tokens=4).values():
            assert answer.version == published.json()["version"]


STOPPED_S = 5.0  # several of the intervals in which replicas report


def test_a_stopped_replica_does_not_stall_the_controller(fleet: Fleet) -> None:
    """It stops in the middle of a call to the controller: replicas wait there for instructions, and
    the others are caught in one of theirs."""
    stopped = process_of(fleet, "rollout")
    controller = serve.get_deployment_handle("controller", app_name=fleet.application)
    with fleet.client() as client:
        ids = members(client)
        stopped.suspend()
        try:
            end = time.monotonic() + STOPPED_S
            while time.monotonic() < end:
                status = controller.fleet.remote().result(timeout_s=20)
                time.sleep(0.2)
        finally:
            stopped.resume()
        silent = sorted(member.silent_s for member in status.members)
        assert silent[0] < STOPPED_S / 2 < silent[-1], "the other replica reports as ever"
        assert members(client) == ids
        talk.train_and_publish(client)


def test_engine_and_trainer_agree_about_the_weights_that_they_share(fleet: Fleet) -> None:
    """A step reads versions and log-probabilities of real answers; masked tokens need none."""
    with fleet.client() as client:
        version = talk.train_and_publish(client)
        answers = [talk.sampled(client, seed) for seed in range(4)]
        batch = json.loads(json.dumps([asdict(answer.trajectory(talk.PROMPT, 1.0)) for answer in answers]))
        tools = [7, 8, 9]
        batch[0]["token_ids"] += tools
        batch[0]["logprobs"] += [0.0] * len(tools)
        batch[0]["loss_mask"] = [True] * len(answers[0].token_ids) + [False] * len(tools)
        batch[1]["advantage"] = [0.5] * len(answers[1].token_ids)
        metrics = talk.succeeded(client.post("/train/step", json={"trajectories": batch})).json()
        assert metrics["tokens"] == sum(len(answer.token_ids) for answer in answers)
        assert (metrics["staleness_max"], metrics["tokens_staleness_0"]) == (0, metrics["tokens"])
        assert metrics["logprob_difference_max"] < 0.01
        assert metrics["effective_sample_fraction"] == pytest.approx(1.0, abs=1e-3)
        # The weights have changed, and the fleet has not: the next step has nothing to compare.
        body = {"trajectories": batch, "settings": {"learning_rate": metrics["learning_rate"] / 2}}
        again = talk.succeeded(client.post("/train/step", json=body)).json()
        assert "logprob_difference_max" not in again
        assert again["learning_rate"] == pytest.approx(metrics["learning_rate"] / 2)
        arrays = to_bytes([Trajectory.from_json(each) for each in batch])
        content = {"content": arrays, "headers": {"content-type": MEDIA_TYPE}}
        third = talk.succeeded(client.post("/train/step", **content)).json()
        assert (third["tokens"], third["step"]) == (metrics["tokens"], metrics["step"] + 2)
        trainer = serve.get_deployment_handle("trainer", app_name=fleet.application)
        fourth = trainer.step.remote(arrays).result(timeout_s=60)
        assert (fourth["tokens"], fourth["step"]) == (metrics["tokens"], metrics["step"] + 3)
        wrong = client.post("/train/step", content=arrays[:-1], headers=content["headers"])
        assert (wrong.status_code, "safetensors" in wrong.text) == (400, True)
        assert talk.train_and_publish(client) == version + 1
