"""Greedy answers of a vLLM engine that is started from a checkpoint, in a process of its own.

A fleet's answers are compared with them. The process reads an `EngineTask` as JSON from its standard input,
and writes a line `ANSWER [[token, ...], ...]`.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import JsonValue, TypeAdapter

MARK = "ANSWER "


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTask:
    """What the engine's process answers.

    Attributes:
        prompts: token ids.
        counts: how many tokens of each.
        arguments: of vLLM's `AsyncEngineArgs`.
        at_once: how many prompts share a batch.
    """

    checkpoint: str
    prompts: Sequence[Sequence[int]]
    counts: Sequence[int]
    arguments: Mapping[str, JsonValue]
    at_once: int


def fresh_answers(
    checkpoint: str,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    *,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    at_once: int = 1,
    timeout_s: float = 300.0,
) -> list[list[int]]:
    """The tokens of a fresh engine, for each prompt.

    Args:
        prompts: token ids.
        counts: how many tokens of each.
        arguments: of vLLM's `AsyncEngineArgs`; those of the fleet's engines.
        environment: set beside this process's own (CUDA_VISIBLE_DEVICES, VLLM_BATCH_INVARIANT).
        at_once: how many prompts share a batch; more than one only where answers do not depend on it.

    Raises:
        RuntimeError: the engine gave no answer; the text has the end of its standard error.
    """
    task = EngineTask(
        checkpoint=checkpoint, prompts=prompts, counts=counts, arguments=dict(arguments), at_once=at_once
    )
    run = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(asdict(task)),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    for line in run.stdout.splitlines():
        if line.startswith(MARK):
            answers: list[list[int]] = json.loads(line.removeprefix(MARK))
            return answers
    raise RuntimeError(f"an engine started from {checkpoint} gave no answer: {run.stderr[-3000:]}")


async def answers_to(task: EngineTask) -> list[list[int]]:
    """Run the engine; the tokens of each prompt."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    # Not vLLM's `LLM`, which has no data parallelism in one process.
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=task.checkpoint, **task.arguments))
    turns = asyncio.Semaphore(task.at_once)

    async def answer(index: int, prompt: Sequence[int], count: int) -> list[int]:
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        tokens: list[int] = []
        async with turns:
            async for output in llm.generate({"prompt_token_ids": list(prompt)}, sampling, str(index)):
                tokens = list(output.outputs[0].token_ids)  # all of them so far
        return tokens

    asked = zip(task.prompts, task.counts, strict=True)
    try:
        return await asyncio.gather(*(answer(index, *each) for index, each in enumerate(asked)))
    finally:
        llm.shutdown()


def main() -> None:
    answers = asyncio.run(answers_to(TypeAdapter(EngineTask).validate_json(sys.stdin.read())))
    print(f"\n{MARK}{json.dumps(answers)}", flush=True)


if __name__ == "__main__":
    main()
