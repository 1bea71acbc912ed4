"""How the fleet's tests ask, train and check: over HTTP, as a user does."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

from app.scenarios.fresh_engine import fresh_answers
from tests.fleet.conftest import MODEL, Fleet

PROMPT = [5, 6, 7, 8, 9]
# Of an engine on the CPU beside the fleet, with what matters of the fleet's own arguments.
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024}
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
Span = dict[str, int]


@dataclass(slots=True, kw_only=True)
class Answer:
    tokens: list[int]
    spans: list[Span]
    version: int
    replica: str
    logprobs: list[float] = field(default_factory=list)


def body(prompt: list[int], max_tokens: int, **options: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **options,
    }


def complete(
    client: httpx.Client,
    prompt: list[int] = PROMPT,
    max_tokens: int = 16,
    headers: Any = None,
    **options: Any,
) -> Answer:
    answer = client.post("/v1/completions", json=body(prompt, max_tokens, **options), headers=headers)
    return parsed(succeeded(answer))


def succeeded(answer: httpx.Response) -> httpx.Response:
    """The answer, which must be a success: the test's failure shows what a user would have read."""
    assert answer.is_success, f"{answer.url} answered {answer.status_code}: {answer.text}"
    return answer


def parsed(answer: httpx.Response) -> Answer:
    data = answer.json()
    choice = data["choices"][0]
    return Answer(
        tokens=choice["token_ids"],
        spans=choice["weight_versions"],
        version=data["weight_version"],
        replica=answer.headers["x-slipstream-replica"],
        logprobs=(choice["logprobs"] or {}).get("token_logprobs", []),
    )


async def ask(
    client: httpx.AsyncClient, prompt: list[int], max_tokens: int, *, stream: bool, **options: Any
) -> Answer:
    payload = body(prompt, max_tokens, stream=stream, **options)
    if not stream:
        answer = await client.post("/v1/completions", json=payload)
        assert answer.status_code == 200, answer.text
        return parsed(answer)
    tokens: list[int] = []
    last: dict[str, Any] = {}
    async with client.stream("POST", "/v1/completions", json=payload) as response:
        assert response.status_code == 200
        # Not aiter_lines: it also splits at U+0085 and its like, which JSON may hold.
        text = b"".join([piece async for piece in response.aiter_bytes()])
        for event in text.split(b"\n\n"):
            if event.startswith(b"data: {"):
                last = json.loads(event[6:])
                assert "error" not in last, last
                tokens += last["choices"][0]["token_ids"] or []
        replica = response.headers["x-slipstream-replica"]
    spans = last["choices"][0]["weight_versions"]
    return Answer(tokens=tokens, spans=spans, version=last["weight_version"], replica=replica)


def train_and_publish(client: httpx.Client, sign: float = 1.0) -> int:
    """One optimizer step on sampled answers, then a round; returns the new version."""
    trajectories = []
    for index in range(4):
        sample = complete(client, max_tokens=12, temperature=1.0, logprobs=1, seed=index)
        trajectories.append(
            {
                "prompt_token_ids": PROMPT,
                "token_ids": sample.tokens,
                "logprobs": sample.logprobs,
                "advantage": sign if index % 2 else -sign,
                "weight_versions": sample.spans,
            }
        )
    succeeded(client.post("/train/step", json={"trajectories": trajectories}))
    report = succeeded(client.post("/train/publish", json={}))
    return int(report.json()["version"])


def on_every_replica(client: httpx.Client, count: int = 2, **options: Any) -> dict[str, Answer]:
    """One answer of each replica; sessions spread over the fleet."""
    answers: dict[str, Answer] = {}
    for session in range(64):
        answer = complete(client, headers={"x-session-id": f"spread-{session}"}, **options)
        answers[answer.replica] = answer
        if len(answers) == count:
            return answers
    raise AssertionError(f"64 sessions reached only {sorted(answers)}")


class Reference:
    """transformers' greedy continuation with the weights of a checkpoint directory."""

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def __call__(self, prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )
        return [int(token) for token in output[0, len(prompt) :]]


def fresh_engine(checkpoint: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy answers of an engine that is started from a checkpoint directory."""
    counts = [count] * len(prompts)
    return fresh_answers(str(checkpoint), prompts, counts, arguments=ENGINE, environment=ENVIRONMENT)


def stored(fleet: Fleet, version: int) -> Path:
    return fleet.checkpoint if version == 0 else fleet.store / f"v{version:08d}"
