"""Killing a replica of the fleet, and waiting until another one has taken its place."""

import time

import httpx
import psutil


def members(client: httpx.Client) -> set[str]:
    """Those that take requests."""
    return {each["replica_id"] for each in client.get("/fleet").json()["members"] if each["admitted"]}


def kill_a_replica(application: str = "slipstream") -> None:
    """By its process id; its engine must go with it."""
    victim = next(
        process
        for process in psutil.process_iter(["name"])
        if f"ServeReplica:{application}:rollout" in " ".join(process.cmdline()[:1])
    )
    engine = victim.children(recursive=True)
    assert engine, "a replica's engine runs in processes of its own"
    victim.kill()
    _, orphans = psutil.wait_procs(engine, timeout=10)
    assert not orphans, "the engine of a killed replica must not live on"


def wait_for_another(client: httpx.Client, before: set[str], timeout_s: float = 150.0) -> None:
    deadline = time.monotonic() + timeout_s
    while len(now := members(client)) < len(before) or now == before:
        assert time.monotonic() < deadline, f"the replica did not come back: {before} before, {now} now"
        time.sleep(0.2)
