"""Fleets whose checkpoint has more than the trainer's model: rounds reach the rest of it, and leave that."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ray import serve

from tests.fleet.session_fleet import MODEL, PORT, Fleet
from tests.fleet.talk import PROMPT, complete, fresh_engine, stored, train_and_publish
from tests.fleet.test_rounds import wait_for
from tests.tiny_models import save_tiny_tied_twice

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]


@contextmanager
def a_fleet_of(checkpoint: Path, root: Path) -> Iterator[Fleet]:
    from app.main import build
    from app.settings.config import parse_config

    config = parse_config(
        {
            "model": str(checkpoint),
            "served_model_name": MODEL,
            "state_dir": str(root / "state"),
            "engine": {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True, "num_replicas": 1},
            "weights": {"lease_s": 30, "heartbeat_timeout_s": 20},
            "trainer": {"optimizer": {"learning_rate": 0.02}},
        }
    )
    serve.run(build(config), name="partial", route_prefix="/partial")
    try:
        store = root / "state" / "store"
        yield Fleet(url=f"http://127.0.0.1:{PORT}/partial", checkpoint=checkpoint, store=store)
    finally:
        serve.delete("partial")


# Not the vision-language model of the trainer's tests: vLLM's needs torchvision, which does not go with a
# torch for CPUs.
def test_a_round_to_a_part_of_a_checkpoint_is_verified_served_and_stored(
    fleet: Fleet, tmp_path: Path
) -> None:
    checkpoint = save_tiny_tied_twice(tmp_path / "model", 5)
    with a_fleet_of(checkpoint, tmp_path) as partial, partial.client() as client:
        before = complete(client, max_tokens=16).token_ids
        version = [train_and_publish(client) for _ in range(2)][-1]
        last = client.get("/fleet/rounds").json()["rounds"][-1]
        assert (last["phase"], last["verification"]) == ("committed", "publisher")
        assert client.get("/train/status").json()["untrained"]
        (expected,) = fresh_engine(wait_for(stored(partial, version)), [PROMPT], 16)
        assert complete(client, max_tokens=16).token_ids == expected != before
