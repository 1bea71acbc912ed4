"""Greedy answers of a fresh vLLM engine in its own process, to compare a fleet's answers with."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

MARK = "ANSWER "
PATIENCE_S = 3.0  # an engine that is told to exit removes its names in /dev/shm


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTokens:
    """Sampled tokens, and the log-probability of each."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


_ANSWERS = TypeAdapter(list[ScoredTokens])


def fresh_answers(
    checkpoint: str,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    *,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    at_once: int = 1,
    timeout_s: float = 300.0,
) -> list[ScoredTokens]:
    """The answer of a fresh engine to each prompt (token ids), with so many tokens each.

    Args:
        arguments: vLLM's `AsyncEngineArgs`; those of the fleet's engines.
        environment: added to this process's (CUDA_VISIBLE_DEVICES, VLLM_BATCH_INVARIANT).
        at_once: prompts that share a batch; more than one only where answers do not depend on it.

    Raises:
        RuntimeError: the engine gave no answer; the text has the end of its stderr.
    """
    task = {"checkpoint": checkpoint, "prompts": prompts, "counts": counts, "at_once": at_once}
    stdout, stderr = run_with_children(
        [sys.executable, "-m", __name__],
        json.dumps(task | {"arguments": dict(arguments)}),
        {**os.environ, **environment},
        timeout_s,
    )
    for line in stdout.splitlines():
        if line.startswith(MARK):
            return _ANSWERS.validate_json(line.removeprefix(MARK))
    raise RuntimeError(f"an engine started from {checkpoint} gave no answer: {stderr[-3000:]}")


def run_with_children(
    command: Sequence[str], stdin: str, environment: Mapping[str, str], timeout_s: float
) -> tuple[str, str]:
    """What a program prints. Its processes end with it: vLLM's outlive one that is killed.

    Raises:
        subprocess.TimeoutExpired: it did not end in time.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, text=True, start_new_session=True
    ) as program:
        try:
            return program.communicate(stdin, timeout_s)
        finally:
            until = time.monotonic() + PATIENCE_S
            with suppress(ProcessLookupError):  # all have ended, as is usual
                os.killpg(program.pid, signal.SIGTERM)
                while time.monotonic() < until:
                    program.poll()
                    os.killpg(program.pid, 0)
                    time.sleep(0.05)
                os.killpg(program.pid, signal.SIGKILL)


async def answers_to(
    checkpoint: str,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    arguments: Mapping[str, Any],
    at_once: int,
) -> list[ScoredTokens]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    # Not vLLM's `LLM`, which has no data parallelism in one process. The usage context sets the default
    # number of tokens per step.
    engine = AsyncEngineArgs(model=checkpoint, **arguments)
    llm = AsyncLLM.from_engine_args(engine, usage_context=UsageContext.OPENAI_API_SERVER)
    slots = asyncio.Semaphore(at_once)

    async def answer(index: int, prompt: Sequence[int], count: int) -> ScoredTokens:
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0)
        async with slots:
            async for output in llm.generate({"prompt_token_ids": list(prompt)}, sampling, str(index)):
                (made,) = output.outputs  # all tokens so far
        pairs = zip(made.token_ids, made.logprobs or (), strict=True)
        logprobs = [of_all[token].logprob for token, of_all in pairs]
        return ScoredTokens(token_ids=list(made.token_ids), logprobs=logprobs)

    asked = zip(prompts, counts, strict=True)
    try:
        return await asyncio.gather(*(answer(index, *each) for index, each in enumerate(asked)))
    finally:
        llm.shutdown()


def main() -> None:
    answers = asyncio.run(answers_to(**json.load(sys.stdin)))
    print(f"\n{MARK}{_ANSWERS.dump_json(answers).decode()}", flush=True)


if __name__ == "__main__":
    main()
