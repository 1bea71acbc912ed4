"""Seconds from a killed replica, or a killed engine, to full strength, with and without the fork server.

    python -m benchmarks.recovery [--kills 3] [--config serve_config.yaml] [--only forked|spawned]

The fleet of a configuration, idle, after one publish: successors start from a stored version, as they do in a
run. `SLIPSTREAM_FORK_SERVER=off` starts every process in an interpreter of its own, as the fleet did before
it had the server.
"""

import argparse
import contextlib
import os
import signal
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import psutil
import yaml

from app.settings.models import resolve_model
from benchmarks.rl_loss import SERVE_CONFIG
from benchmarks.servers import running
from deployments.host.fork_server.client import SWITCH
from slipstream import FleetClient, calls

PORT = 8465
LIMIT_S = 240.0
MARK = "SLIPSTREAM_RECOVERY"  # an environment variable that all processes of the fleet inherit
VICTIMS = {"replica": "ray::ServeReplica:slipstream:rollout", "engine": "VLLM::EngineCore"}


def marked(mark: str) -> dict[str, str]:
    """Environment variables of what `victims` is to find: vLLM's titles else overwrite the environment that
    others see."""
    return {MARK: mark, "SPT_NOENV": "1"}


def victims(title: str, mark: str) -> list[int]:
    """Processes of the fleet that has the mark: others may run beside it."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        command, environment = process.info["cmdline"], process.info["environ"] or {}
        if command and command[0].startswith(title) and environment.get(MARK) == mark:
            found.append(process.pid)
    return sorted(found)


def serving(client: httpx.Client) -> dict[str, int]:
    """Versions of the members that serve."""
    members = client.get("/fleet").json()["members"]
    return {
        each["replica_id"]: each["version"]
        for each in members
        if each["admitted"] and each["state"] == "serving"
    }


def recover(client: httpx.Client, pid: int, before: set[str]) -> float:
    """Kill a process; the seconds until as many replicas serve, one of them new."""
    begin = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    while time.monotonic() < begin + LIMIT_S:
        with contextlib.suppress(httpx.HTTPError, KeyError):
            now = set(serving(client))
            if len(now) == len(before) and now != before:
                return time.monotonic() - begin
        time.sleep(0.05)
    raise SystemExit(f"the fleet was not whole again within {LIMIT_S:g} s")


@contextlib.contextmanager
def fleet(file: Path, mark: str, *, forked: bool) -> Iterator[tuple[httpx.Client, float]]:
    """A fleet, and the seconds that it took to start."""
    config: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    config["http_options"]["port"] = PORT
    arguments = config["applications"][0]["args"]
    replicas = arguments["engine"].get("num_replicas", 1)
    with (
        tempfile.TemporaryDirectory() as root,
        mock.patch.dict(os.environ, marked(mark) | ({} if forked else {SWITCH: "off"})),
    ):
        model = resolve_model(arguments["model"])
        arguments |= {"state_dir": f"{root}/state", "security": {"checkpoint_roots": [root, model]}}
        begin = time.monotonic()
        with (
            running(config, Path(root), replicas=replicas, trainer="trainer" in arguments) as url,
            httpx.Client(base_url=url, timeout=10) as client,
        ):
            start_s = time.monotonic() - begin
            published = Path(root, "published")
            published.mkdir()
            for each in Path(model).iterdir():
                published.joinpath(each.name).symlink_to(each)
            with FleetClient.connect(url) as publisher:
                publisher.send(calls.publish_directory(str(published), None))
            wait_until_stored(client)
            yield client, start_s


def wait_until_stored(client: httpx.Client) -> None:
    """A version that nobody has any more is published again by a trainer; there is none here."""
    begin = time.monotonic()
    while client.get("/fleet").json()["stored_version"] is None:
        if time.monotonic() > begin + LIMIT_S:
            raise SystemExit(f"the published version was not stored within {LIMIT_S:g} s")
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--config", type=Path, default=SERVE_CONFIG)
    parser.add_argument("--only", choices=("forked", "spawned"))
    options = parser.parse_args()
    print("| processes | fleet's start, s | killed | to full strength, s | median |\n|---|---|---|---|---|")
    for name in ("forked", "spawned"):
        if options.only not in (None, name):
            continue
        mark = uuid.uuid4().hex
        with fleet(options.config, mark, forked=name == "forked") as (client, start_s):
            for victim, title in VICTIMS.items():
                times = []
                for _ in range(options.kills):
                    before = set(serving(client))
                    times.append(recover(client, victims(title, mark)[0], before))
                    time.sleep(3)
                each = ", ".join(f"{taken:.1f}" for taken in times)
                print(
                    f"| {name} | {start_s:.1f} | {victim} | {each} | {statistics.median(times):.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
