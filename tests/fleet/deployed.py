"""Fleets in Ray clusters of this test process, and the settings that all of them share."""

import os
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from app.command.runs import MARK, marked_processes
from deployments.host.fork_server.client import __file__ as CLIENT
from tests.free_ports import free_ports

if TYPE_CHECKING:
    from app.settings.config import AppConfig

MODEL = "tiny"
FORKED = "client of a fork"
RAY_AGENTS = ("ray::RuntimeEnvAgent", "ray::DashboardAgent")  # seen to outlive their node by half a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A fleet that runs.

    Attributes:
        application: its name in Serve, and a part of the titles of its processes.
    """

    url: str
    checkpoint: Path
    store: Path
    application: str = "slipstream"

    @property
    def published(self) -> Path:
        """A root below which checkpoints may be published, and adapters loaded."""
        return self.checkpoint.parent / "published"

    def client(self, timeout_s: float = 120.0) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout_s, verify=False)

    def version(self) -> int:
        return int(httpx.get(f"{self.url}/fleet").json()["committed_version"])


def settings(model: Path, state_dir: Path, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The configuration of a small fleet on CPUs."""
    common = {
        "model": str(model),
        "served_model_name": MODEL,
        "state_dir": str(state_dir),
        "engine": {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True, "num_replicas": 2},
        "weights": {"heartbeat_timeout_s": 20},
        "trainer": {"optimizer": {"learning_rate": 0.02}},  # a step changes the greedy answers
    }
    return merged(common, changes or {})


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(settings)
    for name, value in changes.items():
        inner = result.get(name)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        result[name] = merged(inner, value) if both else value  # type: ignore[arg-type]
    return result


def deployed(
    application: str, checkpoint: Path, root: Path, changes: Mapping[str, Any] | None = None
) -> AbstractContextManager[Fleet]:
    """A small fleet on CPUs, `served` with a port of its own.

    Args:
        root: for its state; what it may publish is beside the checkpoint.
        changes: of the configuration.
    """
    from app.settings.config import parse_config

    config = parse_config(settings(checkpoint, root / "state", changes))
    return served(config, checkpoint, free_ports(1)[0], application)


@contextmanager
def served(
    config: "AppConfig", checkpoint: Path, port: int, application: str = "slipstream"
) -> Iterator[Fleet]:
    """A fleet in the Ray cluster of this process, in which Serve does not run yet."""
    from ray import serve

    from app.main import build

    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        began = time.monotonic()
        serve.run(build(config), name=application, route_prefix="/")
        print(f"{application}: up after {time.monotonic() - began:.0f} s", flush=True)
        yield Fleet(
            url=f"http://127.0.0.1:{port}",
            checkpoint=checkpoint,
            store=config.store_path,
            application=application,
        )
    finally:
        serve.shutdown()


@contextmanager
def ray_cluster(**options: Any) -> Iterator[None]:
    """A Ray cluster of this process's own. Afterwards no process of it may be left.

    Args:
        options: of `ray.init`.
    """
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ[MARK] = mark = uuid.uuid4().hex  # which all its processes inherit
    # "local": else it would join a fleet that somebody is running here.
    chosen = {"address": "local", "include_dashboard": False, "num_cpus": 2, "configure_logging": False}
    try:
        try:
            ray.init(**(chosen | options))
        except (
            Exception
        ) as error:  # Ray's own class for a node that took more than its 30 s, as on a busy machine
            print(f"Ray did not start, once more: {error}", flush=True)
            ray.shutdown()
            _end(mark)
            ray.init(**(chosen | options))
        yield
    finally:
        ray.shutdown()
        left = left_behind(mark)
        _end(mark, only=RAY_AGENTS)
        assert not left, f"processes were left behind: {left}"


def _end(mark: str, only: Collection[str] = ()) -> None:
    for pid in marked_processes(mark):
        with suppress(psutil.NoSuchProcess):
            if not only or _name(pid) in only:
                psutil.Process(pid).kill()


def left_behind(mark: str, patience_s: float = 30.0) -> list[str]:
    """Names of a fleet's processes that are still there after a while: Ray ends them without waiting."""
    deadline = time.monotonic() + patience_s
    while True:
        names = [_name(pid) for pid in marked_processes(mark)]
        left = [
            each for each in names if each.startswith(("VLLM::", "ray::", FORKED)) and each not in RAY_AGENTS
        ]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def _name(pid: int) -> str:
    """Empty if the process has ended. A fork has its server's environment: its client is marked."""
    with suppress(psutil.NoSuchProcess):
        words = psutil.Process(pid).cmdline()
        return FORKED if str(CLIENT) in words else str(psutil.Process(pid).name())
    return ""
