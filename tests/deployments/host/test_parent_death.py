"""What an engine's processes name outside of themselves carries its replica's name, and goes with it."""

import os
import signal
import subprocess
import sys

import pytest

from deployments.host.shared_memory import DIRECTORY, remove_orphans

REPLICA = """
import multiprocessing, os, sys
from multiprocessing import shared_memory
from deployments.host.parent_death import follow_owner, own_engine, disown_engine
from deployments.host.shared_memory import owner

def engine(ready, lock):
    follow_owner()
    segment = shared_memory.SharedMemory(create=True, size=8)
    shared_memory.SharedMemory(name=segment.name)
    from vllm.utils.network_utils import get_open_zmq_ipc_path
    open(get_open_zmq_ipc_path().removeprefix("ipc://"), "w").close()
    ready.set()
    ready.wait()
    sys.stdin = open(0)
    import time
    time.sleep(60)

if __name__ == "__main__":
    own_engine()
    context = multiprocessing.get_context("spawn")
    ready, lock = context.Event(), context.Lock()
    process = context.Process(target=engine, args=(ready, lock))
    process.start()
    ready.wait(60)
    print(owner().id, process.pid, flush=True)
    sys.stdin.readline()
    process.kill()
    process.join()
    disown_engine()
    os._exit(0)
"""


def started(tmp_path: object) -> tuple[subprocess.Popen[str], str, int]:
    script = f"{tmp_path}/replica.py"
    with open(script, "w") as file:
        file.write(REPLICA)
    process = subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={key: value for key, value in os.environ.items() if key != "VLLM_RPC_BASE_PATH"},
    )
    assert process.stdout is not None
    owner_id, engine = process.stdout.readline().split()
    return process, owner_id, int(engine)


def listing() -> set[str]:
    names = {path.name for path in DIRECTORY.iterdir()}
    return names | {f"{path.name}/{each.name}" for path in DIRECTORY.glob("*-ipc") for each in path.iterdir()}


@pytest.mark.slow
def test_everything_that_an_engine_names_is_removed_after_its_replica_was_killed(tmp_path: object) -> None:
    process, owner_id, _ = started(tmp_path)
    names = [name for name in listing() if owner_id in name]
    assert any("-psm-" in name for name in names), names
    assert any(name.startswith("sem.") for name in names), names
    assert any("-ipc/" in name for name in names), names
    os.killpg(process.pid, signal.SIGKILL)  # with Python's resource tracker, as Ray kills a worker
    process.wait()
    remove_orphans()
    assert not {name for name in listing() if owner_id in name}


@pytest.mark.long
def test_everything_that_an_engine_names_is_removed_by_a_replica_that_stops_in_order(
    tmp_path: object,
) -> None:
    process, owner_id, _ = started(tmp_path)
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    process.wait(30)
    assert not {name for name in listing() if owner_id in name}
