"""An update in the middle of running requests: pause after N tokens, update, resume, and compare.

    python -m examples.async_inflight --pause-after 32

    train ─► start the requests ─► N tokens of each ─► pause ─► publish ─► resume ─► the rest ─► compare

Needs a trainer, `kv_cache: recompute`, and answers that do not depend on the batch (VLLM_BATCH_INVARIANT=1 on
GPUs, float32 on CPUs). Every token after the switch must be the one that a fresh engine with the new weights
samples after the earlier ones.
"""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer

from app.client import calls
from app.client.completions import complete
from app.client.connection import AsyncFleetClient, FleetClient, FleetError, token_from
from app.client.program_options import LOCAL_URL, Url, json_object, parse
from examples.comparison import AnswerComparison, compare
from examples.fresh_engine import ScoredTokens, fresh_answers
from trainers.trajectory import Trajectory, VersionSpan

SAMPLES = 4
SAMPLE_TOKENS = 12
ENGINE = '{"dtype": "bfloat16", "gpu_memory_utilization": 0.3, "attention_backend": "FLASH_ATTN"}'
ENVIRONMENT = '{"VLLM_BATCH_INVARIANT": "1"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class InflightOptions:
    """An update in the middle of running requests: pause after N tokens, update, resume, and compare."""

    url: Url = LOCAL_URL
    requests: Annotated[int, typer.Option(min=1)] = 16
    tokens: Annotated[int, typer.Option(help="per answer")] = 256
    pause_after: Annotated[int, typer.Option(min=1, help="tokens per answer")] = 32
    engine: Annotated[
        str, typer.Option(help="arguments (JSON) of the fresh engine: those of the fleet's engines")
    ] = ENGINE
    train: Annotated[
        bool, typer.Option(help="make a step first; without it any drift is rounding, not old weights")
    ] = True
    environment: Annotated[
        str, typer.Option(help="variables (JSON) of the fresh engine, such as CUDA_VISIBLE_DEVICES")
    ] = ENVIRONMENT

    def __post_init__(self) -> None:
        if self.pause_after >= self.tokens:
            raise typer.BadParameter(
                f"--pause-after must be from 1 to {self.tokens - 1}, got {self.pause_after}"
            )


@dataclass(slots=True, kw_only=True)
class StreamedRequest:
    """One streamed request; `enough` is set once it has `pause_after` tokens."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def switch(self) -> int:
        """How many tokens are from the old weights."""
        if len(self.spans) != 2:
            raise RuntimeError(
                f"expected tokens of two versions in every answer, got {self.spans}: it was not in flight "
                "during the update; ask for more --tokens"
            )
        return self.spans[0].end

    @property
    def after(self) -> ScoredTokens:
        """The tokens after the switch."""
        return ScoredTokens(token_ids=self.tokens[self.switch :], logprobs=self.logprobs[self.switch :])

    async def run(self, fleet: AsyncFleetClient, model: str, max_tokens: int, pause_after: int) -> None:
        """Receive the answer."""
        try:
            async for piece in fleet.stream(
                complete(model, self.prompt, max_tokens, stream=True, logprobs=1)
            ):
                for answer in piece.answers:
                    self.tokens += answer.token_ids
                    self.logprobs += answer.logprobs
                    self.spans = answer.weight_versions or self.spans
                if len(self.tokens) >= pause_after:
                    self.enough.set()
        finally:
            self.enough.set()


async def in_flight(
    settings: InflightOptions, token: str | None, model: str, prompts: Sequence[list[int]]
) -> list[StreamedRequest]:
    """Requests that were in flight while the fleet took new weights."""
    running = [StreamedRequest(prompt=prompt) for prompt in prompts]
    async with AsyncFleetClient.connect(settings.url, token, at_once=len(prompts) + 1) as fleet:
        tasks = [
            asyncio.create_task(each.run(fleet, model, settings.tokens, settings.pause_after))
            for each in running
        ]
        try:
            await asyncio.gather(*(each.enough.wait() for each in running))
            await fleet.send(calls.pause("keep"))
            try:
                print(f"paused with {[len(each.tokens) for each in running]} tokens", flush=True)
                committed = (await fleet.send(calls.fleet())).committed_version
                report = await fleet.send(calls.publish(after=committed))
                print(f"published version {report.version} in {report.duration_s:.2f} s", flush=True)
            finally:
                await fleet.send(calls.resume())
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    return running


def sample(fleet: FleetClient, model: str, prompt: list[int]) -> list[Trajectory]:
    """Trajectories for a step: every other one has a positive advantage."""
    trajectories = []
    for seed in range(SAMPLES):
        call = complete(model, prompt, SAMPLE_TOKENS, temperature=1.0, logprobs=1, seed=seed)
        answer = fleet.send(call).answer
        trajectories.append(answer.trajectory(prompt, advantage=1.0 if seed % 2 else -1.0))
    return trajectories


def scenario(settings: InflightOptions) -> list[AnswerComparison]:
    """Run it against a fleet.

    Raises:
        RuntimeError: a request was not in flight during the update, or the fresh engine failed.
    """
    arguments = json_object(settings.engine, "--engine")
    environment = json_object(settings.environment, "--environment")
    token = token_from()
    with FleetClient.connect(settings.url, token) as fleet:
        model = fleet.send(calls.model())
        texts = [f"{number} and {number + 1} make" for number in range(settings.requests)]
        prompts = [fleet.send(calls.tokenize(model, text)) for text in texts]
        if settings.train:  # before the pause: a paused fleet answers nothing
            fleet.send(calls.step(sample(fleet, model, prompts[0])))
        running = asyncio.run(in_flight(settings, token, model, prompts))
        with tempfile.TemporaryDirectory(prefix="slipstream-") as directory:
            saved = fleet.send(calls.save(directory)).path

            def fresh(indices: Sequence[int], at_once: int) -> Sequence[ScoredTokens]:
                requests = [running[index] for index in indices]
                return fresh_answers(
                    saved,
                    [request.prompt + request.tokens[: request.switch] for request in requests],
                    [len(request.tokens) - request.switch for request in requests],
                    arguments=arguments,
                    environment=environment,
                    at_once=at_once,
                )

            switches, continued = [each.switch for each in running], [each.after for each in running]
            return compare(switches, continued, fresh)


def main() -> None:
    """Run the scenario and print a table; exits with 1 if an answer differs."""
    comparisons = scenario(parse(InflightOptions))
    print("request  tokens before the switch  after  as a fresh engine's")
    for number, comparison in enumerate(comparisons):
        print(f"{number:7d}  {comparison.before:24d}  {comparison.after:5d}  {comparison.sentence()}")
    equal = sum(comparison.fleet.differs_at is None for comparison in comparisons)
    print(f"{equal} of {len(comparisons)} continuations are those of a fresh engine, token by token")
    if equal < len(comparisons):
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except (FleetError, RuntimeError, ValueError) as error:
        sys.exit(f"async_inflight: {error}")
