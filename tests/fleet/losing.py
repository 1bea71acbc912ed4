"""Killing a replica of the fleet, or its engine in the middle of a round, and waiting for another one."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import psutil

from tests.fleet.deployed import Fleet
from tests.fleet.processes import descendants, wait_until_ended
from tests.fleet.talk import trainer_publishes
from tests.journal_copy import JournalCopy
from tests.waiting import until


def members(client: httpx.Client) -> set[str]:
    """Those that take requests."""
    return {each["replica_id"] for each in client.get("/fleet").json()["members"] if each["admitted"]}


def a_replica(fleet: Fleet) -> psutil.Process:
    return process_of(fleet, "rollout")


def process_of(fleet: Fleet, deployment: str) -> psutil.Process:
    """The process of a deployment, or one of its processes."""
    wanted = f"ServeReplica:{fleet.application}:{deployment}"
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):  # also a zombie
            if wanted in " ".join(process.cmdline()[:1]):
                return process
    raise AssertionError(f"there is no process {wanted!r}")


def kill_controller_when(fleet: Fleet, decision: str, timeout_s: float = 60.0) -> None:
    """As soon as the next decision of a kind is on the disk."""
    controller = process_of(fleet, "controller")
    JournalCopy(fleet.store.parent).until(decision, timeout_s)
    controller.kill()


def kill_with_workers(engine: psutil.Process, timeout_s: float = 30.0) -> None:
    """Afterwards all connections of the engine are closed. vLLM's worker processes notice by themselves that
    their engine core is gone, but some hundred milliseconds later: until then they receive what is sent."""
    processes = [engine, *descendants(engine)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    wait_until_ended(processes, timeout_s)


def kill_a_replica(victim: psutil.Process) -> None:
    """Its engine must go with it."""
    engine = descendants(victim)
    assert engine, "a replica's engine runs in processes of its own"
    victim.kill()
    wait_until_ended(engine, timeout_s=10)


def wait_for_another(client: httpx.Client, before: set[str], timeout_s: float = 240.0) -> None:
    def is_back() -> bool:
        now = members(client)
        return len(now) >= len(before) and now != before

    until(is_back, timeout_s, f"another replica than {before}", pause_s=0.2)


@contextmanager
def a_round_that_hangs(fleet: Fleet, engine: psutil.Process) -> Iterator[list[httpx.Response]]:
    """The engine is stopped, so that the trainer's round that begins cannot end; afterwards it has, and its
    answer is in the list."""
    engine.suspend()
    answers: list[httpx.Response] = []

    def publish() -> None:
        with fleet.client(timeout_s=300) as trainer:
            answers.append(trainer_publishes(trainer))

    publishing = threading.Thread(target=publish)
    publishing.start()
    deadline = time.monotonic() + 30
    with fleet.client() as client:
        while client.get("/fleet").json()["round"] is None:
            assert publishing.is_alive() and time.monotonic() < deadline, "no round was seen"
    time.sleep(1.0)
    assert publishing.is_alive(), "the round must still be open"
    yield answers
    publishing.join(timeout=200)
    assert answers, "the publish has not ended"
