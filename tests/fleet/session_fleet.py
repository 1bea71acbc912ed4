"""One real fleet for the whole session: Ray, Serve, two vLLM engines on a tiny model, a trainer."""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import ray
from ray import serve

from app.command.cluster import MARK, marked_processes

PORT = 8327
MODEL = "tiny"
MAX_IN_FLIGHT = 240
KEPT = 12  # versions: those of a test of ten rounds, and fewer than end while an engine starts
LEARNING_RATE = 0.02  # a step changes the greedy answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    url: str
    checkpoint: Path
    store: Path

    @property
    def published(self) -> Path:
        """A root below which checkpoints may be published."""
        return self.checkpoint.parent / "published"

    def client(self, timeout_s: float = 120.0) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout_s)

    def version(self) -> int:
        return int(httpx.get(f"{self.url}/fleet").json()["committed_version"])


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    from tests.tiny_models import save_tiny_llama

    root = tmp_path_factory.mktemp("fleet")
    checkpoint = save_tiny_llama(root / "model", seed=1)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ[MARK] = mark = uuid.uuid4().hex  # which all processes of this fleet inherit
    # "local": else it would join a fleet that somebody is running here.
    ray.init(
        address="local", include_dashboard=False, num_cpus=2, configure_logging=False, log_to_driver=False
    )
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    from app.main import build
    from app.settings.config import parse_config

    config = parse_config(
        {
            "model": str(checkpoint),
            "served_model_name": MODEL,
            "state_dir": str(root / "state"),
            "engine": {
                "dtype": "float32",
                "max_model_len": 1024,
                "enforce_eager": True,
                "num_replicas": 2,
                # "parameter": a call's arguments are those of the tool's schema, whatever the model is.
                "extra": {
                    "enable_auto_tool_choice": True,
                    "tool_call_parser": "hermes",
                    "tool_strict_level": "parameter",
                },
            },
            "weights": {"lease_s": 30, "heartbeat_timeout_s": 20},
            "router": {
                "max_ongoing_requests": MAX_IN_FLIGHT,
                "max_queued_requests": 0,
                "max_body_bytes": 1 << 20,
                "request_timeout_s": 30,
            },
            "trainer": {"optimizer": {"learning_rate": LEARNING_RATE}},
            "store": {"keep": KEPT},
            "security": {"checkpoint_roots": [str(root / "published")]},
        }
    )
    try:
        serve.run(build(config), name="slipstream", route_prefix="/")
        yield Fleet(url=f"http://127.0.0.1:{PORT}", checkpoint=checkpoint, store=root / "state" / "store")
    finally:
        serve.shutdown()
        ray.shutdown()
        left = left_behind(mark)
        assert not left, f"processes were left behind: {left}"


def left_behind(mark: str, patience_s: float = 30.0) -> list[str]:
    """Names of this fleet's processes that are still there after a while: Ray ends them without waiting."""
    deadline = time.monotonic() + patience_s
    while True:
        left = [
            name for pid in marked_processes(mark) if (name := _name(pid)).startswith(("VLLM::", "ray::"))
        ]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def _name(pid: int) -> str:
    """Empty if the process has ended."""
    with suppress(psutil.NoSuchProcess):
        return str(psutil.Process(pid).name())
    return ""
