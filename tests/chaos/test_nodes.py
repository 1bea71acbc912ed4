"""A machine that is taken away, with a notice or without one: a fault like any other."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from app.client import calls
from app.client.connection import FleetClient
from tests.chaos.arena import Arena, checked_since, under_load
from tests.chaos.launching import SETTINGS, Launched, launch
from tests.chaos.marked_weights import save_marked
from tests.chaos.timing import LOST
from tests.fleet.deployed import merged
from tests.free_ports import free_ports
from tests.waiting import until

_ADDRESS = "127.0.0.3"  # of this node; the first one has 127.0.0.2
_HEAD = "ray.scripts.scripts start --head"
_STOP_S = 30.0


class Node:
    """A second Ray node of the fleet's cluster, which has joined.

    Attributes:
        id: Ray's.
    """

    def __init__(self, launched: Launched, process: subprocess.Popen[bytes], ray_address: str) -> None:
        self._launched = launched
        self._process = process
        self._ray_address = ray_address
        self.id = ""

    def joined(self) -> bool:
        """Whether Ray schedules on it."""
        with suppress(httpx.HTTPError, KeyError):
            answer = httpx.get(f"{self._launched.dashboard}/api/v0/nodes", timeout=10, trust_env=False)
            for each in answer.json()["data"]["result"]["result"]:
                if each["node_ip"] == _ADDRESS and each["state"] == "ALIVE":
                    self.id = str(each["node_id"])
        return bool(self.id)

    def processes(self) -> list[psutil.Process]:
        """All that run there."""
        with suppress(psutil.Error):
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        return []

    def replicas(self) -> list[psutil.Process]:
        """Those of the rollout deployment."""
        there = {each.pid for each in self.processes()}
        return [each for each in self._launched.named("replica") if each.pid in there]

    def announce_end(self, notice_s: int) -> None:
        """Tell Ray that it will be taken away, as a cloud's notice to a spot machine does."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
        command += [f"--address={self._ray_address}", f"--node-id={self.id}"]
        command += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot"]
        command += [f"--deadline-remaining-seconds={notice_s}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def end(self, number: signal.Signals) -> None:
        """Send the signal to everything there at once: the machine goes down, or away."""
        there = self.processes()
        for each in there:
            with suppress(psutil.Error):
                each.send_signal(number)
        psutil.wait_procs(there, _STOP_S)
        self._process.wait(_STOP_S)


@contextmanager
def second_node(launched: Launched, log: Path) -> Iterator[Node]:
    """A node with the environment of the first one; whatever is left of it is killed at the end."""
    (head,) = [each for each in launched.processes() if _HEAD in " ".join(each.cmdline())]
    found = re.search(r"--port=(\d+)", " ".join(head.cmdline()))
    assert found is not None, head.cmdline()
    address = f"127.0.0.2:{found[1]}"
    options = ("node-manager-port", "object-manager-port", "metrics-export-port")
    options += ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "runtime-env-agent-port")
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += [f"--address={address}", f"--node-ip-address={_ADDRESS}"]
    command += [f"--{name}={port}" for name, port in zip(options, free_ports(len(options)), strict=True)]
    command += ["--min-worker-port=0", "--max-worker-port=0"]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=head.environ(), start_new_session=True
        )
    node = Node(launched, process, address)
    try:
        until(node.joined, 90, f"the second node, see {log}")
        yield node
    finally:
        there = node.processes()
        for each in there:
            with suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(there, _STOP_S)
        process.wait(_STOP_S)


pytestmark = [
    pytest.mark.chaos,
    pytest.mark.serve,
    pytest.mark.fleet("nodes"),
    pytest.mark.long,
    pytest.mark.timeout(580),
]
REPLICAS = 3
SCALE_S = 200.0
DRAIN_S = 10.0


@pytest.fixture
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Arena, Node]]:
    """Three replicas, at least one of them on the second node."""
    root = tmp_path_factory.mktemp("nodes")
    engine = {"num_replicas": 1, "max_replicas": 4, "drain_timeout_s": DRAIN_S}
    settings, model = merged(SETTINGS, {"engine": engine}), save_marked(root / "model", 0)
    # One proxy: both nodes are this machine, and have its ports.
    with (
        launch(root, model, settings, proxy_location="HeadOnly") as launched,
        second_node(launched, root / "node") as node,
    ):
        with launched.client() as client:  # before there is load: engines start slowly beside it
            FleetClient(client).send(calls.scale(REPLICAS))
            until(lambda: client.get("/fleet").json()["size"]["running"] == REPLICAS, SCALE_S, "replicas")
        assert node.replicas(), "Serve spreads replicas over nodes"
        with under_load(launched, root / "seen.jsonl", replicas=REPLICAS) as arena:
            until(arena.whole, 120, "a whole fleet")
            yield arena, node


def ended(arena: Arena, begin: float, taken: int, **figures: Any) -> list[str]:
    """The events that tell of losses, by name, once the fleet is whole again and no promise was broken."""
    recording = checked_since(arena, begin, may_lose=taken)
    events = [each.name for each in recording.events if each.name in (*LOST, "left")]
    figures |= {
        "taken": taken,
        "answers": len(recording.answers),
        "not_whole": sum(not each.whole for each in recording.answers),
        "events": events,
    }
    print(json.dumps(figures), flush=True)
    return events


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_node_that_goes_away_takes_its_replicas_and_nothing_else(
    two_nodes: tuple[Arena, Node], number: signal.Signals
) -> None:
    arena, node = two_nodes
    taken, begin = len(node.replicas()), time.time()
    node.end(number)
    events = ended(arena, begin, taken)
    assert len(events) == taken, events


@pytest.mark.parametrize("notice_s", [300, 45], ids=["long", "short"])
def test_a_node_that_is_announced_to_end_loses_nothing(two_nodes: tuple[Arena, Node], notice_s: int) -> None:
    """With a notice longer than a replica's graceful stop Serve starts the replacement first. Else it stops
    the replica at once and in order, and the others take its requests.
    """
    arena, node = two_nodes
    taken, begin = len(node.replicas()), time.time()
    fewest = REPLICAS
    node.announce_end(notice_s)

    def empty() -> bool:
        nonlocal fewest
        if (fleet := arena.fleet()) is not None:
            fewest = min(fewest, sum(each["admitted"] for each in fleet["members"]))
        return not node.replicas()

    until(empty, SCALE_S, "an empty node")
    empty_s = time.time() - begin
    node.end(signal.SIGKILL)
    events = ended(arena, begin, taken, empty_s=round(empty_s, 1), fewest=fewest)
    assert events == ["left"] * taken, "no fence, and no loss"
    assert (fewest == REPLICAS) == (notice_s == 300), fewest
    assert empty_s < notice_s
