"""A fleet over hosts (`benchmarks/hosts.py`), started by the commands of docs/guides/cluster.md."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from app.client.connection import bearer
from benchmarks.hosts import DASHBOARD_PORT, START_S, Host, Hosts
from tests.documents import commands_of
from tests.environment import users_environment
from tests.fleet.deployed import Fleet, merged, settings
from tests.waiting import until

PAGE = "docs/guides/cluster.md"
PORT = 8000
STATE = Path("/tmp/state")
TOKEN = "a-token-of-these-hosts"
UP_S = 400.0
STOP_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A fleet and the hosts that it runs on."""

    hosts: Hosts
    fleet: Fleet
    environment: Mapping[str, str]

    def client(self, timeout_s: float = 60.0) -> httpx.Client:
        return httpx.Client(
            base_url=self.fleet.url, timeout=timeout_s, headers=bearer(TOKEN), trust_env=False
        )

    def places(self, deployment: str) -> list[str]:
        """The hosts' addresses of the replicas of a deployment that run."""
        dashboard = f"http://{self.hosts[0].address}:{DASHBOARD_PORT}/api/serve/applications/"
        application = httpx.get(dashboard, trust_env=False).json()["applications"]["slipstream"]
        found = application["deployments"][deployment]["replicas"]
        return [each["node_ip"] for each in found if each["state"] == "RUNNING"]


@contextmanager
def served(
    hosts: Hosts,
    root: Path,
    model: Path,
    changes: Mapping[str, Any],
    on_first: tuple[str, ...] = ("controller", "trainer"),
    **variables: str,
) -> Iterator[Cluster]:
    """`on_first`: the deployments that are on the first host, beside Ray's head."""
    # Small chunks, so that a round on slow links has many. Below /tmp each host has a directory of its own.
    common = {
        "store": {"shared": False},
        "engine": {"num_replicas": len(hosts)},
        "weights": {"transport": "gloo", "chunk_bytes": 1 << 16},
    }
    first = {"num_cpus": 0, "resources": {f"node:{hosts[0].address}": 0.001}}
    pinned = [{"name": name, "ray_actor_options": first} for name in on_first]
    application = {"name": "slipstream", "import_path": "app.main:build", "deployments": pinned}
    document = {
        "http_options": {"host": "0.0.0.0", "port": PORT},
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [{**application, "args": settings(model, STATE, merged(common, changes))}],
    }
    (root / "cluster.yaml").write_text(yaml.safe_dump(document))
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = users_environment(
        PATH=programs, SLIPSTREAM_TOKEN=TOKEN, RAY_AUTH_MODE="disabled", **variables
    )
    for host in hosts:
        command = _command(hosts, "ray start --head" if host is hosts[0] else "ray start --address")
        command = command.replace(hosts[1].address, host.address)
        host.run("bash", "-c", command, env=environment, timeout_s=START_S)
    output = root / "output"
    with output.open("wb") as stream:
        command = _command(hosts, "slipstream serve")
        serve = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=root, env=environment, stdout=stream, stderr=stream
        )
    fleet = Fleet(url=f"http://{hosts[0].address}:{PORT}", checkpoint=model, store=store_of(hosts[0]))
    try:
        up = f"Slipstream is up: {fleet.url} "
        until(lambda: serve.poll() is not None or up in output.read_text(), UP_S, f"a fleet, see {output}")
        assert serve.poll() is None, output.read_text()
        yield Cluster(hosts=hosts, fleet=fleet, environment=environment)
    finally:
        serve.send_signal(signal.SIGINT)
        assert serve.wait(STOP_S) == 0, output.read_text()


def _command(hosts: Hosts, program: str) -> str:
    """The page's, with the addresses of these hosts."""
    (found,) = commands_of(PAGE, program)
    network = hosts[0].address.rpartition(".")[0]
    return found.replace("10.0.0.", f"{network}.")


def store_of(host: Host) -> Path:
    """This machine's path of a host's own store."""
    return host.tmp / STATE.relative_to("/tmp") / "store"
