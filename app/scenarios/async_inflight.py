"""An update in the middle of running requests: pause after N tokens, update, resume, and compare.

    python -m app.scenarios.async_inflight --pause-after 32

The fleet needs a trainer, `kv_cache: recompute`, and engines whose answers do not depend on the batch
(VLLM_BATCH_INVARIANT=1 on GPUs, float32 on CPUs). Then each answer goes on, after the switch, exactly as
an engine does that is started from the new weights and given what came before: that is checked for
every request, token by token, with an engine in a process of its own.

    start the requests ─► N tokens of each ─► pause ─► train, publish ─► resume ─► the rest ─► compare
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from app.scenarios.fresh_engine import fresh_answers
from app.scenarios.service import Service, Span, token_from

SAMPLES = 4
SAMPLE_TOKENS = 12


@dataclass(slots=True, kw_only=True)
class Running:
    """One streamed request. `enough` is set once it has `pause_after` tokens."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def switch(self) -> int:
        """How many tokens the old weights made.

        Raises:
            RuntimeError: the answer was not made by exactly two versions.
        """
        if len(self.spans) != 2:
            raise RuntimeError(
                f"expected tokens of two versions in every answer, got {self.spans}: it was not in flight "
                "during the update; ask for more --tokens"
            )
        return self.spans[0]["end"]

    async def run(self, service: Service, max_tokens: int, pause_after: int) -> None:
        try:
            async for event in service.stream(self.prompt, max_tokens):
                if "error" in event:
                    raise RuntimeError(f"a request in flight failed: {event['error']}")
                for choice in event["choices"]:
                    self.tokens += choice.get("token_ids") or []
                    self.spans = choice.get("weight_versions", self.spans)
                if len(self.tokens) >= pause_after:
                    self.enough.set()
        finally:
            self.enough.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request, in tokens."""

    before: int  # those of the old weights
    total: int
    differs_at: int | None  # where the rest stops being what a fresh engine says


async def in_flight(
    service: Service, prompts: Sequence[list[int]], max_tokens: int, pause_after: int
) -> list[Running]:
    """Requests that were in flight while the fleet took new weights."""
    running = [Running(prompt=prompt) for prompt in prompts]
    tasks = [asyncio.create_task(each.run(service, max_tokens, pause_after)) for each in running]
    try:
        await asyncio.gather(*(each.enough.wait() for each in running))
        await asyncio.to_thread(service.post, "/pause?mode=keep")
        try:
            print(f"paused with {[len(each.tokens) for each in running]} tokens", flush=True)
            await asyncio.to_thread(update, service)
        finally:
            await asyncio.to_thread(service.post, "/resume")
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return running


def sample(service: Service, prompt: list[int]) -> list[dict[str, Any]]:
    """Trajectories that a step learns something from: some are called good, some bad."""
    trajectories = []
    for seed in range(SAMPLES):
        answer = service.complete(prompt, SAMPLE_TOKENS, temperature=1.0, logprobs=1, seed=seed)
        choice = answer["choices"][0]
        trajectories.append(
            {
                "prompt_token_ids": prompt,
                "token_ids": choice["token_ids"],
                "logprobs": choice["logprobs"]["token_logprobs"],
                "advantage": 1.0 if seed % 2 else -1.0,
                "weight_versions": choice["weight_versions"],
            }
        )
    return trajectories


def update(service: Service) -> None:
    report = service.post("/train/publish")
    print(f"published version {report['version']} in {report['duration_s']:.2f} s", flush=True)


def compare(running: Sequence[Running], rest: Sequence[list[int]]) -> list[Outcome]:
    outcomes = []
    for request, expected in zip(running, rest, strict=True):
        actual = request.tokens[request.switch :]
        places = [i for i, (a, b) in enumerate(zip(actual, expected, strict=True)) if a != b]
        first = request.switch + places[0] if places else None
        outcomes.append(Outcome(before=request.switch, total=len(request.tokens), differs_at=first))
    return outcomes


def scenario(options: argparse.Namespace) -> list[Outcome]:
    service = Service(options.url, token_from())
    prompts = [service.tokenize(f"{number} and {number + 1} make") for number in range(options.requests)]
    # Before the pause: a paused fleet answers nothing.
    service.post("/train/step", {"trajectories": sample(service, prompts[0])})
    running = asyncio.run(in_flight(service, prompts, options.tokens, options.pause_after))
    with tempfile.TemporaryDirectory(prefix="slipstream-") as directory:
        saved = service.post("/train/save", {"path": directory})["path"]
        rest = fresh_answers(
            saved,
            [request.prompt + request.tokens[: request.switch] for request in running],
            [len(request.tokens) - request.switch for request in running],
            arguments=options.engine,
            environment=options.environment,
            at_once=len(running),
        )
    return compare(running, rest)


def main(arguments: list[str] | None = None) -> None:
    outcomes = scenario(parse(arguments))
    print("request  tokens before the switch  after  as a fresh engine's")
    for number, outcome in enumerate(outcomes):
        same = "yes" if outcome.differs_at is None else f"not from token {outcome.differs_at} on"
        after = outcome.total - outcome.before
        print(f"{number:7d}  {outcome.before:24d}  {after:5d}  {same}")
    equal = sum(outcome.differs_at is None for outcome in outcomes)
    print(f"{equal} of {len(outcomes)} continuations are those of a fresh engine, token by token")
    if equal < len(outcomes):
        sys.exit(1)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the fleet")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--pause-after", type=int, default=32, help="tokens of every answer")
    parser.add_argument(
        "--engine",
        type=json.loads,
        default={"dtype": "bfloat16", "gpu_memory_utilization": 0.3, "attention_backend": "FLASH_ATTN"},
        help="arguments (JSON) of the engine to compare with: those of the fleet's engines",
    )
    parser.add_argument(
        "--environment",
        type=json.loads,
        default={"VLLM_BATCH_INVARIANT": "1"},
        help="of that engine (JSON); CUDA_VISIBLE_DEVICES says where it runs",
    )
    options = parser.parse_args(arguments)
    if not 0 < options.pause_after < options.tokens:
        parser.error(f"--pause-after must be from 1 to {options.tokens - 1}, got {options.pause_after}")
    return options


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(f"async_inflight: {error}")
