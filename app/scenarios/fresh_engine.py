"""Greedy answers of a vLLM engine that was started from a checkpoint, in a process of its own.

What a fleet's answers are compared with. The process reads one JSON object from its standard input
(checkpoint, arguments, prompts, counts), and writes a line `ANSWER [[token, ...], ...]`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

MARK = "ANSWER "


def fresh_answers(
    checkpoint: str,
    prompts: Sequence[list[int]],
    counts: Sequence[int],
    *,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    timeout_s: float = 300.0,
) -> list[list[int]]:
    """
    Args:
        prompts: token ids.
        counts: how many tokens of each.
        arguments: of vLLM's `LLM`; those of the fleet's engines.
        environment: set beside this process's own (CUDA_VISIBLE_DEVICES, VLLM_BATCH_INVARIANT).

    Raises:
        RuntimeError: the engine gave no answer; the text has the end of what it said.
    """
    task = {
        "checkpoint": checkpoint,
        "arguments": dict(arguments),
        "prompts": list(prompts),
        "counts": list(counts),
    }
    run = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(task),
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
    raise RuntimeError(f"an engine started from {checkpoint} gave no answer: {run.stderr[-2000:]}")


def main() -> None:
    from vllm import LLM, SamplingParams

    task = json.loads(sys.stdin.read())
    llm = LLM(model=task["checkpoint"], **task["arguments"])
    sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in task["counts"]]
    prompts = [{"prompt_token_ids": ids} for ids in task["prompts"]]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    print(f"\n{MARK}{json.dumps([list(output.outputs[0].token_ids) for output in outputs])}", flush=True)


if __name__ == "__main__":
    main()
