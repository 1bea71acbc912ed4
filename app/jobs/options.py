"""The RL job's options: each one is a field of `Options`, and typer makes the command line of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from app.client.connection import LOCAL_URL
from app.client.options import Url, json_object
from app.jobs.rewards import EXTRACTORS, Extraction, load_reward
from app.jobs.tasks import PromptFileTask, ReasoningGymTask, Task
from trainers.advantages import AdvantageEstimator

DEFAULT_TASK_SETTINGS = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """GRPO against a running fleet: sample, score, step, publish."""

    url: Url = LOCAL_URL
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps, those before a --resume included")] = 20
    groups_per_step: Annotated[int, typer.Option(min=1, help="prompts of one batch")] = 12
    answers_per_group: Annotated[
        int, typer.Option(min=2, help="answers to each prompt; they are judged by each other")
    ] = 8
    groups_in_flight: Annotated[int, typer.Option(min=1, help="prompts that the fleet answers at a time")] = 6
    max_tokens: Annotated[int, typer.Option(min=1, help="of an answer")] = 16
    stop: Annotated[
        list[str] | None,
        typer.Option(help="ends an answer; may be given more than once", show_default="a line break"),
    ] = None
    max_staleness: Annotated[
        int, typer.Option(min=0, help="versions that a batch may be behind the trainer")
    ] = 2
    advantage: Annotated[AdvantageEstimator, typer.Option(help="its formula")] = AdvantageEstimator.GRPO
    task: Annotated[str, typer.Option(help="a data set of reasoning-gym")] = "chain_sum"
    task_settings: Annotated[str, typer.Option(help="of the data set, as JSON")] = DEFAULT_TASK_SETTINGS
    instruction: Annotated[str, typer.Option(help="the system message of --task")] = "Solve the problem."
    shots: Annotated[int, typer.Option(min=0, help="solved examples in the prompt")] = 0
    extract: Annotated[Extraction, typer.Option(help="the part of an answer that is graded")] = (
        Extraction.LAST_NUMBER
    )
    prompts: Annotated[
        Path | None,
        typer.Option(help="a JSON Lines file with 'prompt' or 'messages', instead of --task"),
    ] = None
    reward: Annotated[
        str | None, typer.Option(help="package.module:function(entry, answer) -> float, for --prompts")
    ] = None
    seed: Annotated[int, typer.Option(help="of the problems")] = 0
    metrics: Annotated[
        Path | None,
        typer.Option(help="the run's record, JSON Lines", show_default="a new one in the cache"),
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="continue the run of --metrics, or the newest one")
    ] = False

    @property
    def stop_strings(self) -> Sequence[str]:
        return ("\n",) if self.stop is None else self.stop

    def load_task(self) -> Task:
        """Where the prompts come from, and what scores their answers.

        Raises:
            ValueError: the task, its settings, the prompts or the reward are missing or wrong.
        """
        extract = EXTRACTORS[self.extract]
        if (self.prompts is None) != (self.reward is None):
            raise ValueError("--prompts and --reward go together, got only one of them")
        if self.prompts is not None and self.reward is not None:
            return PromptFileTask(self.prompts, load_reward(self.reward), extract=extract)
        return ReasoningGymTask(
            self.task,
            json_object(self.task_settings, "--task-settings"),
            instruction=self.instruction,
            shots=self.shots,
            seed=self.seed,
            extract=extract,
        )
