"""vLLM servers as a teacher and as a judge, over HTTP."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForSequenceClassification

from app.client.connection import AsyncFleetClient
from app.jobs import grpo, metrics
from app.jobs.judge import Judge
from app.jobs.options import JobOptions
from app.jobs.teacher import Teacher
from benchmarks.servers import CPU, vllm_serve
from tests.fleet.deployed import Fleet
from tests.fleet.talk import saved, stored, succeeded, wait_for
from tests.free_ports import free_ports
from tests.tiny_models import save_tiny_llama, save_tokenizer, tiny_llama
from tests.trainers import tiny

pytestmark = [pytest.mark.serve, pytest.mark.long, pytest.mark.timeout(600)]
SEED = 2  # the policy's is 1


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = save_tiny_llama(tmp_path_factory.mktemp("teacher") / "model", seed=SEED)
    engine = CPU.engine | {"max_model_len": 1024}
    with vllm_serve(free_ports(1)[0], setup=replace(CPU, model=str(directory), engine=engine)) as url:
        yield url


async def test_a_judges_reward_is_its_models_score(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = tiny_llama(3).config
    config.num_labels, config.architectures = 1, ["LlamaForSequenceClassification"]
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    conversation = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    ids = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(conversation, return_dict=False)
    with torch.no_grad():
        expected = float(model(torch.tensor([ids])).logits[0, 0])
    engine = CPU.engine | {"max_model_len": 1024, "runner": "pooling"}
    with vllm_serve(free_ports(1)[0], setup=replace(CPU, model=str(tmp_path), engine=engine)) as url:
        judge = Judge.connect(f"{url}/v1", None, timeout_s=60.0)
        assert await judge({}, "", {"messages": conversation}) == pytest.approx(expected, abs=1e-4)


@pytest.mark.fleet("shared")
async def test_the_teachers_log_probabilities_are_its_models(teacher: str) -> None:
    asked = [tiny.trajectory((40, 41, 42), (50, 60, 70)), tiny.trajectory((43,), (51, 1))]
    async with AsyncFleetClient.connect(teacher) as client:
        given = Teacher(client=client, model="smollm2-135m", top_k=5, kl=0.0)
        scored, gap = await given.score(asked, version=0)
    gaps = []
    for each in scored:
        assert each.teacher is not None
        with torch.no_grad():
            ids = torch.tensor([each.prompt_token_ids + each.token_ids])
            logprobs = tiny_llama(SEED)(ids).logits[0, len(each.prompt_token_ids) - 1 : -1].log_softmax(-1)
        best = logprobs.topk(5)
        assert np.frombuffer(each.teacher.token_ids, np.int32).tolist() == best.indices.flatten().tolist()
        found = torch.tensor(np.frombuffer(each.teacher.logprobs, np.float32).copy())
        torch.testing.assert_close(found, best.values.flatten(), rtol=0, atol=1e-4)
        own = logprobs.gather(-1, torch.tensor(each.token_ids)[:, None])
        gaps += (torch.tensor(each.logprobs) - own[:, 0]).tolist()
    assert gap == pytest.approx(fmean(gaps), abs=1e-4)


@pytest.mark.fleet("shared")
@pytest.mark.parametrize("loss", ["forward_kl", "sft"])
def test_a_fleet_learns_to_answer_as_its_teacher(
    fleet: Fleet, teacher: str, tmp_path: Path, loss: str
) -> None:
    """Without learning a step's divergence of 8.7 nats varied by 0.5, over 21 steps."""
    start_from(fleet, saved(fleet, 1))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "Say a."}) + "\n")
    options = JobOptions(
        url=fleet.url,
        prompts=prompts,
        teacher=f"{teacher}/v1",
        loss=loss,
        learning_rate=5e-3,
        steps=16,
        groups_per_step=2,
        answers_per_group=16,
        groups_in_flight=2,
        max_tokens=2,
        metrics=tmp_path / "metrics.jsonl",
    )
    assert grpo.run(options, time.monotonic()) == 0
    steps = metrics.records(options.metrics)
    found = [step.trainer["loss"] if loss == "sft" else step.teacher_kl for step in steps]
    nats = [each for each in found if isinstance(each, float)]
    assert len(nats) == 16 and fmean(nats[-4:]) < nats[0] / 2, nats


def start_from(fleet: Fleet, directory: Path) -> None:
    with fleet.client() as http:
        made = succeeded(http.post("/fleet/publish", json={"path": str(directory)})).json()
        wait_for(stored(fleet, made["version"]))
        succeeded(http.post("/fleet/rollback", json={"version": made["version"]}))
