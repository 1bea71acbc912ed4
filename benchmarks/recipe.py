"""What the programs of `benchmarks.run` share: the problems, their reward, and the record of steps."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.jobs.options import Extraction

PROBLEMS = 8192
SYSTEM = {"role": "system", "content": "Solve the problem."}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Answers end with the model's end of sequence or at `max_tokens`: AsyncGRPO takes no stop string."""

    model: str  # a directory
    device: str  # cuda or cpu
    steps: int
    groups: int  # prompts of a step
    answers: int  # to each prompt
    max_tokens: int
    learning_rate: float
    max_staleness: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a learner.

    Attributes:
        ended: seconds since 1970.
        tokens: sampled tokens that it learned from.
        staleness: versions behind, mean.
        dropped: answers that were too stale.
        update_s: how long its new weights took to reach the engines.
        wait_s: how long it waited for answers; None: not known.
    """

    step: int
    ended: float
    reward: float
    tokens: float
    staleness: float = 0.0
    dropped: float = 0.0
    update_s: float = 0.0
    wait_s: float | None = None

    def append(self, path: Path) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self)) + "\n")


def steps(path: Path) -> list[Step]:
    """All complete lines; none without a file."""
    if not path.exists():
        return []
    return [Step(**json.loads(line)) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def problems(seed: int, count: int = PROBLEMS) -> list[dict[str, Any]]:
    """Sums and differences of two digits, in the words of reasoning-gym's `chain_sum`."""
    drawn = random.Random(seed)
    made = []
    for _ in range(count):
        left, sign, right = drawn.randrange(10), drawn.choice("+-"), drawn.randrange(10)
        question = f"State the final answer to the following arithmetic problem: {left} {sign} {right} ="
        answer = left + right if sign == "+" else left - right
        made.append({"messages": [SYSTEM, {"role": "user", "content": question}], "answer": str(answer)})
    return made


def graded(text: str, answer: str) -> float:
    """1 if the last number of the first line is the answer."""
    return float(Extraction.LAST_NUMBER.of(Extraction.FIRST_LINE.of(text)) == answer)


async def reward(entry: Mapping[str, Any], text: str) -> float:
    """For `slipstream rl --reward`."""
    return graded(text, entry["answer"])


def rewards(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """For TRL, which gives conversations."""
    return [graded(each[-1]["content"], right) for each, right in zip(completions, answer, strict=True)]
