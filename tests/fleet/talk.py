"""How the fleet's tests ask, train and check: over HTTP, as a user does."""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import torch
from transformers import AutoModelForCausalLM

from app.client import calls, completions
from app.client.completions import Answer, join
from app.client.connection import AsyncFleetClient, FleetClient
from tests.fleet.deployed import MODEL, Fleet
from tests.tiny_models import tiny_llama
from tests.waiting import until

T = TypeVar("T")
PROMPT = [5, 6, 7, 8, 9]
# Of an engine on the CPU beside the fleet, with what matters of the fleet's own arguments.
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024}
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def body(prompt: Sequence[int], max_tokens: int, **options: Any) -> Mapping[str, Any]:
    """The body of a greedy completion, for a test that sends it itself."""
    request = completions.complete(MODEL, prompt, max_tokens, **options).body
    assert request is not None
    return request


def complete(
    client: httpx.Client,
    prompt: Sequence[int] = PROMPT,
    max_tokens: int = 16,
    headers: Mapping[str, str] | None = None,
    **options: Any,
) -> Answer:
    call = completions.complete(MODEL, prompt, max_tokens, headers=headers, **options)
    return FleetClient(client).send(call).answer


def succeeded(answer: httpx.Response) -> httpx.Response:
    """The answer, which must be a success: the test's failure shows what a user would have read."""
    assert answer.is_success, f"{answer.url} answered {answer.status_code}: {answer.text}"
    return answer


async def ask(
    client: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int, *, stream: bool, **options: Any
) -> Answer:
    fleet = AsyncFleetClient(client)
    call = completions.complete(MODEL, prompt, max_tokens, stream=stream, **options)
    if not stream:
        return (await fleet.send(call)).answer
    return join([piece async for piece in fleet.stream(call)])


async def begun(
    client: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int, *, model: str = MODEL
) -> "asyncio.Task[Answer]":
    """A streamed answer whose first token has come: an engine is at it."""
    first = asyncio.Event()

    async def read() -> Answer:
        pieces = []
        try:
            async for piece in AsyncFleetClient(client).stream(
                completions.complete(model, prompt, max_tokens, stream=True)
            ):
                pieces.append(piece)
                first.set()
        finally:
            first.set()
        return join(pieces)

    reading = asyncio.create_task(read())
    await first.wait()
    return reading


def sampled(client: httpx.Client, seed: int) -> Answer:
    """An answer that a trainer can learn from."""
    return complete(client, max_tokens=12, temperature=1.0, logprobs=1, seed=seed)


def trainer_publishes(client: httpx.Client, **body: Any) -> httpx.Response:
    """A round of the trainer, over what others have published since its last one."""
    after = FleetClient(client).send(calls.fleet()).committed_version
    return client.post("/train/publish", json={"after": after, **body})


def train(client: httpx.Client, sign: float = 1.0) -> None:
    """One optimizer step on sampled answers."""
    batch = [
        sampled(client, index).trajectory(PROMPT, advantage=sign if index % 2 else -sign)
        for index in range(4)
    ]
    FleetClient(client).send(calls.step(batch))


def train_and_publish(client: httpx.Client, sign: float = 1.0) -> int:
    """A step, then a round of the weights; returns the new version."""
    train(client, sign)
    return int(succeeded(trainer_publishes(client)).json()["version"])


def saved(fleet: Fleet, seed: int, *, shard_size: str = "50GB") -> Path:
    """A checkpoint of random weights that the fleet may publish, in shards of at most `shard_size`."""
    directory = fleet.published / f"checkpoint-{seed}"
    tiny_llama(seed).save_pretrained(directory, max_shard_size=shard_size)
    return directory


def on_every_replica(client: httpx.Client, count: int = 2, **options: Any) -> dict[str, Answer]:
    """One answer of each replica."""

    def ask(session: str) -> tuple[str, Answer]:
        answer = complete(client, headers={"x-session-id": session}, **options)
        return answer.replica, answer

    return from_every_replica(ask, count)


def from_every_replica(
    ask: Callable[[str], tuple[str, T]], count: int = 2, patience_s: float = 60.0
) -> dict[str, T]:
    """What `ask` got of each replica; it takes a session, and says which replica it was.

    Sessions spread over the replicas. One that has just joined is a member of the fleet before Serve has told
    the routers of it.
    """
    found: dict[str, T] = {}
    deadline, sessions = time.monotonic() + patience_s, itertools.count()
    while len(found) < count:
        assert time.monotonic() < deadline, f"{next(sessions)} sessions reached only {sorted(found)}"
        replica, answer = ask(f"spread-{next(sessions)}")
        found[replica] = answer
        time.sleep(0.02)
    return found


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

    def continues(self, prompt: list[int], tokens: list[int]) -> int:
        """How many of the tokens are those that it says itself after the prompt."""
        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        agrees = logits.argmax(-1) == torch.tensor(tokens)
        return len(tokens) if agrees.all() else int(agrees.int().argmin())

    def logprobs(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """Of the tokens, after the prompt."""
        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        chosen = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens)[:, None])
        return [float(value) for value in chosen[:, 0]]


def stored(fleet: Fleet, version: int) -> Path:
    return fleet.checkpoint if version == 0 else fleet.store / f"v{version:08d}"


def wait_for(directory: Path, timeout_s: float = 30.0) -> Path:
    """The store is written after the commit, off the critical path."""
    until(directory.is_dir, timeout_s, f"{directory} is written")
    return directory


def served_checkpoint(fleet: Fleet) -> Path:
    """What the fleet serves now."""
    return wait_for(stored(fleet, fleet.version()))
