import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from ray import serve

from app.command.runs import MARK, marked_processes
from tests.fleet.deployed import Fleet
from tests.fleet.gpu_fleets import INVARIANT, needs_gpus, tiny_fleet
from tests.fleet.losing import a_round_that_hangs, members, wait_for_another
from tests.fleet.talk import complete, on_every_replica, train_and_publish
from tests.waiting import until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]
PORT = 8377
TOKENS = 24
AT_ONCE_S = 25.0  # not the minute after which the group gives a peer up


@needs_gpus(3)
def test_a_replica_and_a_trainer_that_die_in_a_round_leave_the_others_serving(tmp_path: Path) -> None:
    overrides = {"engine": {"env": INVARIANT, "enforce_eager": True}}
    with tiny_fleet("nccl_two_replicas", tmp_path, PORT, overrides) as (fleet, client, _):
        a_replica_dies(fleet, client)
        the_trainer_dies(fleet, client)


def a_replica_dies(fleet: Fleet, client: httpx.Client) -> None:
    version = train_and_publish(client)
    before = on_every_replica(client, max_tokens=TOKENS)
    serving = members(client)
    engine = an_engine()
    with a_round_that_hangs(fleet, engine) as answers:
        engine.kill()
        killed = time.monotonic()
    took_s = time.monotonic() - killed
    (answer,) = answers
    print(f"a replica died in a round, over after {took_s:.1f} s: {answer.text[:300]}", flush=True)
    assert answer.is_success, "it was sent again, to the survivor"
    assert took_s < AT_ONCE_S
    now = version + 1
    survivor = complete(client, max_tokens=TOKENS)
    assert survivor.version == now == fleet.version() and survivor.replica in before
    wait_for_another(client, serving)
    for found in on_every_replica(client, max_tokens=TOKENS).values():
        assert (found.version, found.token_ids) == (now, survivor.token_ids)
    assert train_and_publish(client) == now + 1, "and the next round reaches both"


def the_trainer_dies(fleet: Fleet, client: httpx.Client) -> None:
    version, before = fleet.version(), on_every_replica(client, max_tokens=TOKENS)
    handle: Any = serve.get_deployment_handle("trainer", app_name="slipstream")
    (rank,) = handle.process_ids.remote().result(timeout_s=30)
    engine = an_engine()
    with a_round_that_hangs(fleet, engine) as answers:
        os.kill(rank, signal.SIGKILL)
        time.sleep(1.0)
        engine.resume()
    (answer,) = answers
    print("the trainer died in a round:", answer.status_code, answer.text[:300], flush=True)
    assert answer.status_code == 503 and "died" in answer.json()["error"]["message"]
    assert fleet.version() == version
    for name, found in on_every_replica(client, max_tokens=TOKENS).items():
        assert (found.version, found.token_ids) == (version, before[name].token_ids)
    until(lambda: client.get("/train/status").is_success, 120, "the trainer is back")
    assert train_and_publish(client) == version + 1


def an_engine() -> psutil.Process:
    mine = [psutil.Process(pid) for pid in marked_processes(os.environ[MARK])]
    return next(process for process in mine if process.name().startswith("VLLM::"))
