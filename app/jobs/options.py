"""The RL job's command line."""

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.jobs.rewards import EXTRACTORS, load_reward
from app.jobs.tasks import PromptFileTask, ReasoningGymTask, Task
from trainers.advantages import AdvantageEstimator


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """See `parser` for what each one means."""

    url: str
    steps: int
    groups_per_step: int
    answers_per_group: int
    groups_in_flight: int
    max_tokens: int
    stop: list[str]
    max_staleness: int
    advantage: AdvantageEstimator
    task: str
    task_settings: dict[str, Any]
    instruction: str
    shots: int
    extract: str
    prompts: Path | None
    reward: str | None
    seed: int
    metrics: Path | None
    resume: bool
    token: str | None

    def load_task(self) -> Task:
        """Raises ValueError: the task, its settings, the prompts or the reward are not there or not sound."""
        extract = EXTRACTORS[self.extract]
        if (self.prompts is None) != (self.reward is None):
            raise ValueError("--prompts and --reward go together, got only one of them")
        if self.prompts is not None and self.reward is not None:
            return PromptFileTask(self.prompts, load_reward(self.reward), extract=extract)
        settings = self.task_settings
        return ReasoningGymTask(
            self.task,
            settings,
            instruction=self.instruction,
            shots=self.shots,
            seed=self.seed,
            extract=extract,
        )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m app.jobs.grpo",
        description="GRPO against a running fleet: sample, score, step, publish.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = made.add_argument
    url = os.environ.get("SLIPSTREAM_URL", "http://127.0.0.1:8000")
    add("--url", default=url, help="the fleet's address")
    add("--steps", type=_positive, default=20, help="optimizer steps, those before a --resume included")
    add("--groups-per-step", type=_positive, default=12, help="prompts of one batch")
    add("--answers-per-group", type=_positive, default=8, help="answers to each prompt")
    add("--groups-in-flight", type=_positive, default=6, help="prompts that the fleet answers at a time")
    add("--max-tokens", type=_positive, default=16, help="of an answer")
    add("--stop", action="append", default=None, help="ends an answer; may be given more than once")
    add("--max-staleness", type=int, default=2, help="versions that a batch may be behind the trainer")
    add("--advantage", default=AdvantageEstimator.GRPO.value, choices=[e.value for e in AdvantageEstimator])
    add("--task", default="chain_sum", help="a data set of reasoning-gym")
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    add("--task-settings", type=_object, default=settings, help="of the data set, as JSON")
    add("--instruction", default="Solve the problem.", help="the system message of --task")
    add("--shots", type=int, default=0, help="solved examples in the prompt")
    add("--extract", default="last-number", choices=sorted(EXTRACTORS), help="what of an answer is graded")
    add("--prompts", type=Path, help="a JSON Lines file with 'prompt' or 'messages', instead of --task")
    add("--reward", help="package.module:function(entry, answer) -> float, for --prompts")
    add("--seed", type=int, default=0, help="of the problems")
    add("--metrics", type=Path, help="the run's record, JSON Lines (default: a new one in the cache)")
    add("--resume", action="store_true", help="go on with the run of --metrics, or the newest one")
    return made


def parse(arguments: list[str] | None = None) -> Options:
    """Exits with a sentence on what argparse can judge.

    Raises:
        ValueError: settings that do not go together.
    """
    values = vars(parser().parse_args(arguments))
    if values["answers_per_group"] < 2:
        raise ValueError("--answers-per-group must be at least 2: an answer is judged by the others")
    if values["stop"] is None:
        values["stop"] = ["\n"]
    values["url"] = values["url"].rstrip("/")
    values["advantage"] = AdvantageEstimator(values["advantage"])
    token = os.environ.get("SLIPSTREAM_TOKEN", "").strip()
    return Options(**values, token=token if token else None)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return value


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected JSON, got {text!r}: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value
