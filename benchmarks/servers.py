"""The two servers that the serving benchmarks compare: a Slipstream fleet and `vllm serve`."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from app.settings.models import resolve_model

MODEL = "smollm2-135m"
START_TIMEOUT_S = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The model and the engine arguments that both servers run with.

    Attributes:
        model: the built-in model's name, or a directory.
        engine: vLLM's engine arguments.
        settings: further sections of the fleet's configuration.
        environment: of the engines.
    """

    model: str = MODEL
    engine: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


CPU = Setup(
    engine={"dtype": "float32", "max_model_len": 2048, "enforce_eager": True, "max_num_seqs": 64},
    environment={
        "OMP_NUM_THREADS": str(os.cpu_count() or 1),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    },
)


def gpu(model: Path, *, transport: str = "nccl") -> Setup:
    """Random weights of a real shape; both engines share one GPU, and one of them is always idle.

    A trainer shares the GPU of a replica if the transport is `ipc`; else it has one of its own.
    """
    shares = transport == "ipc"
    return Setup(
        model=str(model),
        engine={
            "dtype": "bfloat16",
            "max_model_len": 4096,
            "max_num_seqs": 256,
            "extra": {"load_format": "dummy"},
            "gpu_memory_utilization": 0.45,
            **({"gpus_per_rank": 0.5} if shares else {}),
        },
        settings={
            "device": "cuda",
            "weights": {"transport": transport, "staging": "host"},
            **({"placement": "colocated"} if shares else {}),
        },
    )


@contextmanager
def fleet(
    port: int, *, setup: Setup = CPU, replicas: int = 1, trainer: bool = False, **settings: Any
) -> Iterator[str]:
    """A fleet, started as `make serve` starts it; yields its URL once it is healthy."""
    with tempfile.TemporaryDirectory() as root:
        config = {
            "http_options": {"host": "127.0.0.1", "port": port},
            "logging_config": {"log_level": "WARNING", "enable_access_log": False},
            "applications": [
                {
                    "name": "slipstream",
                    "route_prefix": "/",
                    "import_path": "app.main:build",
                    "args": {
                        "model": setup.model,
                        "served_model_name": MODEL,
                        "state_dir": f"{root}/state",
                        "engine": setup.engine | {"num_replicas": replicas},
                        **({"trainer": {}} if trainer else {}),
                        **setup.settings,
                        **settings,
                    },
                }
            ],
        }
        with running(config, Path(root), replicas=replicas, trainer=trainer) as url:
            yield url


@contextmanager
def running(config: dict[str, Any], root: Path, *, replicas: int, trainer: bool) -> Iterator[str]:
    """The fleet of a Serve config, whose file and log are below `root`; yields its URL once it is healthy."""
    port = config["http_options"]["port"]
    file = root / "fleet.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "app.command.cli", "serve", "--config", str(file)]
    command += ["--dashboard-port", str(port + 1)]
    with _process(command, root / "log", {}) as process:
        url = f"http://127.0.0.1:{port}"
        _until_ready(process, f"{url}/health", root / "log", replicas)
        if trainer:
            _until_ready(process, f"{url}/train/status", root / "log")
        yield url


@contextmanager
def vllm_serve(port: int, *, setup: Setup = CPU) -> Iterator[str]:
    """`vllm serve` with the same engine arguments; yields its URL once it is healthy."""
    with tempfile.TemporaryDirectory() as root:
        # The module that `vllm serve` runs. The command itself does not start with vllm-cpu: it needs the
        # version of a distribution named vllm.
        command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
        model = str(resolve_model(setup.model))
        command += ["--model", model, "--served-model-name", MODEL, model]  # AsyncGRPO asks for the latter
        command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
        arguments = {**setup.engine, **setup.engine.get("extra", {})}
        arguments.pop("extra", None)
        for name, value in arguments.items():
            flag = "--" + name.replace("_", "-")
            command += [flag] if value is True else [flag, str(value)]
        environment = {
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "HF_HUB_OFFLINE": "1",
            **setup.environment,
        }
        with _process(command, Path(root) / "log", environment) as process:
            url = f"http://127.0.0.1:{port}"
            _until_ready(process, f"{url}/health", Path(root) / "log")
            yield url


@contextmanager
def _process(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the servers with the benchmark
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment
        )
        try:
            yield process
        except KeyboardInterrupt:  # by hand, or by a limit of time
            print(log.read_text(errors="replace")[-3000:], file=sys.stderr, flush=True)
            raise
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


def _until_ready(process: subprocess.Popen[bytes], url: str, log: Path, serving: int | None = None) -> None:
    """`serving`: replicas that the answer must report."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended:\n{log.read_text()[-3000:]}")
        try:
            answer = httpx.get(url, timeout=30)
            if answer.status_code == 200 and (serving is None or answer.json()["serving"] >= serving):
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise TimeoutError(f"{url} was not ready within {START_TIMEOUT_S:.0f} s:\n{log.read_text()[-3000:]}")
