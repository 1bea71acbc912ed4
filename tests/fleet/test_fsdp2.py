"""A trainer of two ranks (FSDP2 over Gloo, on the CPU) and one replica: it serves what both ranks hold, also
after the only replica, or a rank, has died.
"""

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve

from tests.fleet.deployed import Fleet, deployed
from tests.fleet.keeping import KEEPER
from tests.fleet.losing import a_replica, a_round_that_is_open, kill_a_replica, members, wait_for_another
from tests.fleet.talk import PROMPT, Reference, complete, train_and_publish
from tests.tiny_models import save_tiny_llama
from tests.waiting import until

pytestmark = [pytest.mark.serve, pytest.mark.fleet("sharded"), pytest.mark.long, pytest.mark.timeout(600)]
LAYERS = 8  # enough, in small chunks, for a round to last
RANKS = 2


@pytest.fixture
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return KEEPER.fleet("sharded", tmp_path_factory, _start)


def _start(root: Path) -> AbstractContextManager[Fleet]:
    changes = {
        "engine": {"num_replicas": 1},
        "weights": {"chunk_bytes": 1 << 16},
        "trainer": {"strategy": "fsdp2", "world_size": RANKS, "cpu_threads": 1},
    }
    return deployed("sharded", save_tiny_llama(root / "model", seed=3, layers=LAYERS), root, changes)


def rank_ids() -> list[int]:
    handle: Any = serve.get_deployment_handle("trainer", app_name="sharded")
    return list(handle.process_ids.remote().result(timeout_s=30))


def test_a_version_that_died_with_its_replicas_is_published_anew(sharded: Fleet, tmp_path: Path) -> None:
    """All replicas die before the store has the committed version: the trainer publishes what it has."""
    with sharded.client() as client:
        with full_disk(rank_ids()[0], longest_bytes=1 << 20):
            version = train_and_publish(client)
            published = complete(client, max_tokens=24).token_ids
            assert f"version {version} is not in the store" in wait_for_problem(client)
            before = members(client)
            kill_a_replica(a_replica(sharded))
            wait_for_another(client, before)
        answer = complete(client, max_tokens=24)
        assert answer.token_ids == published, "these weights were in no store and in no replica"
        assert answer.version == version + 1
        saved = Path(client.post("/train/save", json={"path": str(tmp_path / "saved")}).json()["path"])
        assert published == Reference(saved)(PROMPT, 24) != Reference(sharded.checkpoint)(PROMPT, 24)
        last = client.get("/fleet/rounds").json()["rounds"][-1]
        assert last["label"] == f"version {version} was lost"


def test_a_rank_that_dies_in_a_round_is_named_and_the_fleet_serves_what_it_served(sharded: Fleet) -> None:
    with sharded.client() as client:
        version = train_and_publish(client)
        until(lambda: client.get("/fleet").json()["stored_version"] == version, 60, "the stored version")
        before = complete(client, max_tokens=24).token_ids
        ranks = rank_ids()
        with a_round_that_is_open(sharded) as (answers, _):
            os.kill(ranks[1], signal.SIGKILL)
        (answer,) = answers
        assert answer.status_code == 503, answer.text
        assert "rank 1 of the trainer died during 'publish'" in answer.json()["error"]["message"]
        after = complete(client, max_tokens=24)
        assert (after.version, after.token_ids) == (version, before)
        wait_for_other_ranks(client, ranks)
        assert train_and_publish(client) == version + 1
        assert complete(client, max_tokens=24).version == version + 1


@contextmanager
def full_disk(pid: int, longest_bytes: int) -> Iterator[None]:
    """No file of this process can become longer: a segment of a chunk is shorter, a version's file is not."""
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (longest_bytes, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def wait_for_other_ranks(client: httpx.Client, before: list[int], timeout_s: float = 120.0) -> None:
    """Until Serve has replaced the trainer, all ranks of it."""

    def replaced() -> bool:
        try:
            return client.get("/train/status").is_success and not set(rank_ids()) & set(before)
        except Exception as error:  # the old one is gone, the new one not there: any of Serve's errors
            print("not yet:", error)
            return False

    until(replaced, timeout_s, "another trainer", pause_s=0.5)


def wait_for_problem(client: httpx.Client, timeout_s: float = 20.0) -> str:
    deadline = time.monotonic() + timeout_s
    while (problem := client.get("/train/status").json()["store_problem"]) is None:
        assert time.monotonic() < deadline, "the store cannot be written, and the status does not say so"
        time.sleep(0.2)
    return str(problem)
