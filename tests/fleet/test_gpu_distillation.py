"""The trained adapter's earlier versions as its teacher: on a CPU vLLM's engine with adapters answers no
`prompt_logprobs`."""

import json
import time
from pathlib import Path

import pytest

from app.jobs import grpo, metrics
from app.jobs.options import JobOptions
from tests.fleet.gpu_fleets import INVARIANT, needs_gpus, tiny_fleet

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420), needs_gpus(1)]


def test_the_adapter_one_version_behind_is_a_teacher(tmp_path: Path) -> None:
    overrides = {
        "engine": {
            "env": INVARIANT,
            "enforce_eager": True,
            "extra": {"enable_lora": True, "max_loras": 4, "max_lora_rank": 16},
        },
        "weights": {"staging": "host"},
        "adapters": {"keep": 4},
        "rollouts": {},
        "trainer": {"lora": {"name": "trained", "rank": 4, "alpha": 16.0}},
    }
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {word}."}) + "\n" for word in "abcd"))
    with tiny_fleet("ipc", tmp_path, 8396, overrides) as (fleet, _, _):
        options = JobOptions(
            url=fleet.url,
            prompts=prompts,
            teacher="trained@-1",
            teacher_kl=0.1,
            learning_rate=0.05,
            steps=3,
            groups_per_step=2,
            answers_per_group=4,
            max_staleness=0,
            stop=[""],
            metrics=tmp_path / "metrics.jsonl",
        )
        assert grpo.run(options, time.monotonic()) == 0
    first, *_, last = metrics.records(tmp_path / "metrics.jsonl")
    assert first.teacher_kl is not None and last.teacher_kl is not None
    assert abs(first.teacher_kl) < 0.05, "the adapter's first version is the policy"
    assert last.version == 4
