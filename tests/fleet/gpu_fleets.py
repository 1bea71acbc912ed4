"""Whole applications on GPUs: the ready-made configurations with tiny models, and engines to compare with."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
import yaml
from ray import serve

from app.cluster import MARK, marked_processes
from app.config import AppConfig, parse_config
from tests.fleet.conftest import MODEL, Fleet

CONFIGS = Path(__file__).parents[2] / "app" / "configs"
# An engine whose answers do not depend on the batch, so that a fresh one gives the same tokens.
INVARIANT = {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
SMALL_ENGINE: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 64,
    "gpu_memory_utilization": 0.15,
    "load_format": "dummy",
    # A fixed size: other processes on the GPU would disturb vLLM's profile of free memory.
    "extra": {"attention_backend": "FLASH_ATTN", "kv_cache_memory_bytes": 1 << 30},
}
FRESH_ENGINE = """
import asyncio, json, sys
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

async def main(arguments, prompts, count):
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    answers = []
    for index, prompt in enumerate(prompts):  # one at a time, as the fleet is asked
        async for output in llm.generate({"prompt_token_ids": prompt}, sampling, request_id=str(index)):
            tokens = list(output.outputs[0].token_ids)
        answers.append(tokens)
    print("ANSWER", json.dumps(answers), flush=True)
    llm.shutdown()

if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])))
"""


def needs_gpus(count: int) -> pytest.MarkDecorator:
    present = torch.cuda.device_count()
    return pytest.mark.skipif(present < count, reason=f"needs {count} GPUs, there are {present}")


def configuration(
    name: str, checkpoint: Path, state_dir: Path, overrides: Mapping[str, Any] | None = None
) -> AppConfig:
    """A ready-made configuration with a tiny model: only sizes differ, and what `overrides` says."""
    document = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    args = document["applications"][0]["args"]
    small = {
        "model": str(checkpoint),
        "served_model_name": MODEL,
        "state_dir": str(state_dir),
        "engine": SMALL_ENGINE,
    }
    if "trainer" in args:
        small["trainer"] = {"optimizer": {"learning_rate": 0.02}}  # a step changes the greedy answers
    return parse_config(merged(merged(args, small), overrides or {}))


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(settings)
    for name, value in changes.items():
        inner = result.get(name)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        result[name] = merged(inner, value) if both else value  # type: ignore[arg-type]
    return result


@contextmanager
def running(config: AppConfig, checkpoint: Path, port: int) -> Iterator[Fleet]:
    """The application in a Ray cluster of its own. Afterwards nothing of it may be left."""
    from app.main import build

    os.environ[MARK] = mark = uuid.uuid4().hex
    ray.init(address="local", include_dashboard=False, configure_logging=False, object_store_memory=1 << 30)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        begin = time.perf_counter()
        serve.run(build(config), name="slipstream", route_prefix="/")
        print(f"up after {time.perf_counter() - begin:.0f} s", flush=True)
        yield Fleet(url=f"http://127.0.0.1:{port}", checkpoint=checkpoint, store=config.store_path)
    finally:
        serve.shutdown()
        ray.shutdown()
        left = left_behind(mark)
        assert not left, f"processes were left behind: {left}"


def left_behind(mark: str, patience_s: float = 30.0) -> list[str]:
    """Names of this application's processes that are still there after a while."""
    deadline = time.monotonic() + patience_s
    while True:
        names = [psutil.Process(pid).name() for pid in marked_processes(mark) if psutil.pid_exists(pid)]
        left = [name for name in names if name.startswith(("VLLM::", "ray::"))]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def fresh_answers(
    config: AppConfig, saved: Path, prompts: list[list[int]], count: int, tmp_path: Path
) -> list[list[int]]:
    """Greedy answers of an engine with the fleet's own arguments, started from a checkpoint by itself."""
    from app.main import engine_spec

    own = {"model": str(saved), "load_format": "auto", "enable_sleep_mode": False}
    arguments = {**engine_spec(config, str(saved)).arguments, **own}
    script = tmp_path / "fresh_engine.py"
    script.write_text(FRESH_ENGINE)
    run = subprocess.run(
        [sys.executable, str(script), json.dumps(arguments), json.dumps(prompts), str(count)],
        env={**os.environ, **config.engine.env},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    answers = [line for line in run.stdout.splitlines() if line.startswith("ANSWER ")]
    assert answers, run.stderr[-3000:]
    result: list[list[int]] = json.loads(answers[0].removeprefix("ANSWER "))
    return result
