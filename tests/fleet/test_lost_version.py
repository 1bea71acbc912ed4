"""All replicas die before the store has the committed version: the trainer publishes what it has."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from ray import serve

from tests.fleet.conftest import MODEL, PORT, Fleet
from tests.fleet.losing import kill_a_replica, members, wait_for_another
from tests.fleet.talk import PROMPT, Reference, complete, train_and_publish

pytestmark = [pytest.mark.serve, pytest.mark.chaos, pytest.mark.timeout(300)]
APPLICATION = "lost"


@pytest.fixture
def alone(fleet: Fleet, tmp_path: Path) -> Iterator[Fleet]:
    """A fleet of one replica, whose store cannot be written: a file is where its directory would be."""
    from app.main import build
    from app.settings.config import parse_config

    store = tmp_path / "state" / "store"
    store.parent.mkdir()
    store.touch()
    config = parse_config(
        {
            "model": str(fleet.checkpoint),
            "served_model_name": MODEL,
            "state_dir": str(tmp_path / "state"),
            "engine": {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True, "num_replicas": 1},
            "weights": {"lease_s": 30, "heartbeat_timeout_s": 20},
            "trainer": {"optimizer": {"learning_rate": 0.02}},
        }
    )
    serve.run(build(config), name=APPLICATION, route_prefix=f"/{APPLICATION}")
    try:
        yield Fleet(url=f"http://127.0.0.1:{PORT}/{APPLICATION}", checkpoint=fleet.checkpoint, store=store)
    finally:
        serve.delete(APPLICATION)


def test_a_version_that_died_with_its_replicas_is_published_anew(alone: Fleet, tmp_path: Path) -> None:
    with alone.client() as client:
        version = train_and_publish(client)
        saved = Path(client.post("/train/save", json={"path": str(tmp_path / "saved")}).json()["path"])
        expected = Reference(saved)(PROMPT, 24)
        assert expected != Reference(alone.checkpoint)(PROMPT, 24)
        assert complete(client, max_tokens=24).token_ids == expected
        status = wait_for_problem(client)
        assert f"version {version} is not in the store" in status
        before = members(client)
        kill_a_replica(APPLICATION)
        wait_for_another(client, before)
        answer = complete(client, max_tokens=24)
        assert answer.token_ids == expected, "these weights were in no store and in no replica"
        assert answer.version == version + 1
        last = client.get("/fleet/rounds").json()["rounds"][-1]
        assert last["label"] == f"version {version} was lost"


def wait_for_problem(client: httpx.Client, timeout_s: float = 20.0) -> str:
    deadline = time.monotonic() + timeout_s
    while (problem := client.get("/train/status").json()["store_problem"]) is None:
        assert time.monotonic() < deadline, "the store cannot be written, and nobody says so"
        time.sleep(0.2)
    return str(problem)
