"""A second Ray node of a fleet's cluster: a machine that may be taken away."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil

from tests.chaos.launching import Launched
from tests.free_ports import free_ports
from tests.waiting import until

_ADDRESS = "127.0.0.3"  # of this node; the first one has 127.0.0.2
_HEAD = "ray.scripts.scripts start --head"
_STOP_S = 30.0


class Node:
    """One that has joined.

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
