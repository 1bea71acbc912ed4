"""The RL job's options: fields of `JobOptions`, from which typer makes the command line.

Imports neither torch nor the job.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.client.program_options import LOCAL_URL, Url, json_object
from trainers.estimators import DISTILLING, AdvantageEstimator

if TYPE_CHECKING:
    from trainers.settings import StepSettings

DEFAULT_TASK_SETTINGS = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'


# "-2" has a sign; "5 - 3" and "7-8" have none.
_NUMBER = re.compile(r"(?<![\d.])-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


class Extraction(StrEnum):
    """The part of an answer that is graded."""

    LAST_NUMBER = "last-number"
    WHOLE = "whole"
    FIRST_LINE = "first-line"

    def of(self, answer: str) -> str:
        match self:
            case Extraction.LAST_NUMBER:
                found = _NUMBER.findall(answer.replace("\N{MINUS SIGN}", "-"))
                return found[-1].replace(",", "") if found else ""
            case Extraction.FIRST_LINE:
                return answer.strip().partition("\n")[0].strip()
            case Extraction.WHOLE:
                return answer.strip()


class Tracking(StrEnum):
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """GRPO against a running fleet: sample, score, step, publish. `@ run.toml` reads options from a file."""

    url: Url = LOCAL_URL
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps, those before a --resume included")] = 20
    groups_per_step: Annotated[int, typer.Option(min=1, help="prompts per batch")] = 12
    answers_per_group: Annotated[
        int, typer.Option(min=2, help="group size: rollouts of each prompt, which are compared")
    ] = 8
    groups_in_flight: Annotated[int, typer.Option(min=1, help="prompts in flight")] = 6
    max_tokens: Annotated[int, typer.Option(min=1, help="per answer, or per turn in --environment")] = 16
    stop: Annotated[
        list[str] | None,
        typer.Option(help="stop string; repeatable; '' is none", show_default="a line break"),
    ] = None
    max_staleness: Annotated[int, typer.Option(min=0, help="versions that a batch may be behind")] = 2
    advantage: Annotated[AdvantageEstimator, typer.Option(help="formula")] = AdvantageEstimator.GRPO
    learning_rate: Annotated[
        float | None, typer.Option(help="of this run's steps", show_default="the trainer's")
    ] = None
    loss: Annotated[
        str | None, typer.Option(help="ppo_clip, grpo, dapo, ...", show_default="the trainer's")
    ] = None
    loss_settings: Annotated[str, typer.Option(help="settings of --loss, as JSON")] = "{}"
    teacher: Annotated[
        str | None,
        typer.Option(
            help="a model to learn from: a vLLM server's URL, NAME@VERSION of the fleet's, or NAME@-K: K "
            "versions behind (docs/guides/distillation.md)"
        ),
    ] = None
    teacher_model: Annotated[
        str | None, typer.Option(help="at the URL of --teacher", show_default="its first")
    ] = None
    teacher_top_k: Annotated[
        int, typer.Option(min=1, help="the teacher's log-probabilities per token, for --loss jsd and others")
    ] = 20
    teacher_kl: Annotated[
        float,
        typer.Option(min=0, help="times log(teacher / policy) of a token is added to its advantage"),
    ] = 0.0
    updates_per_step: Annotated[
        int | None, typer.Option(min=1, help="optimizer steps per batch", show_default="the trainer's")
    ] = None
    max_grad_norm: Annotated[
        float | None, typer.Option(help="gradients are clipped to it", show_default="the trainer's")
    ] = None
    task: Annotated[str, typer.Option(help="a data set of reasoning-gym")] = "chain_sum"
    task_settings: Annotated[str, typer.Option(help="settings of the data set, as JSON")] = (
        DEFAULT_TASK_SETTINGS
    )
    instruction: Annotated[str, typer.Option(help="the system message of --task")] = "Solve the problem."
    extract: Annotated[Extraction, typer.Option(help="the part of an answer that is graded")] = (
        Extraction.LAST_NUMBER
    )
    prompts: Annotated[
        Path | None,
        typer.Option(help="a JSON Lines file with 'prompt' or 'messages', instead of --task"),
    ] = None
    reward: Annotated[
        str | None,
        typer.Option(
            help="for --prompts: package.module:function(entry, answer) -> float, or the URL of a judge"
        ),
    ] = None
    rubric: Annotated[
        Path | None,
        typer.Option(help="what a chat model at the URL of --reward is told; without it: a reward model"),
    ] = None
    reward_processes: Annotated[
        int, typer.Option(min=1, help="of a --reward that is not async; 1 keeps the order of answers")
    ] = 4
    reward_timeout: Annotated[
        float, typer.Option(min=0.001, help="seconds for one answer, or one reply of --environment")
    ] = 600.0
    environment: Annotated[
        str | None,
        typer.Option(
            help="instead of --task: package.module:factory, or verifiers (docs/guides/environments.md)"
        ),
    ] = None
    environment_settings: Annotated[
        str,
        typer.Option(
            help="arguments of --environment, as JSON; verifiers needs 'command': what vf-eval takes"
        ),
    ] = "{}"
    max_turns: Annotated[int, typer.Option(min=1, help="per rollout in --environment")] = 8
    dynamic_sampling: Annotated[
        bool,
        typer.Option("--dynamic-sampling", help="replace groups with equal rewards"),
    ] = False
    overlong_buffer: Annotated[
        int,
        typer.Option(min=0, help="tokens before --max-tokens in which the reward falls by up to 1; 0: no"),
    ] = 0
    eval_every: Annotated[int, typer.Option(min=0, help="steps between evaluations; 0: none")] = 0
    eval_problems: Annotated[
        int, typer.Option(min=1, help="held-out problems per evaluation, at most those that differ")
    ] = 64
    eval_attempts: Annotated[int, typer.Option(min=1, help="rollouts of each, for pass@k")] = 4
    eval_prompts: Annotated[
        Path | None, typer.Option(help="held-out prompts for --prompts, a file of the same form")
    ] = None
    solved_from: Annotated[float, typer.Option(help="the reward from which a rollout is right")] = 1.0
    keep_best: Annotated[
        Path | None,
        typer.Option(help="a directory on the trainer's host for the version that evaluates best"),
    ] = None
    log: Annotated[
        list[Tracking] | None,
        typer.Option(help="also write metrics there; repeatable", show_default="none"),
    ] = None
    seed: Annotated[int, typer.Option(help="seed of the problems")] = 0
    metrics: Annotated[
        Path | None,
        typer.Option(help="the run's record, JSON Lines", show_default="a new one in the cache"),
    ] = None
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="print the options, try the data and the reward, and change nothing"),
    ] = False
    resume: Annotated[
        bool, typer.Option("--resume", help="continue the run of --metrics, or the newest one")
    ] = False

    @property
    def stop_strings(self) -> Sequence[str]:
        return ("\n",) if self.stop is None else [each for each in self.stop if each]

    @property
    def longest(self) -> int:
        return self.max_tokens * (1 if self.environment is None else self.max_turns)

    def check(self) -> None:
        """Raises ValueError for options that do not go together."""
        if self.eval_every == 0 and self.keep_best is not None:
            raise ValueError("--keep-best needs --eval-every")
        if self.overlong_buffer > self.longest:
            raise ValueError(
                f"--overlong-buffer must be at most {self.longest} tokens, got {self.overlong_buffer}"
            )
        compares_all = self.advantage is AdvantageEstimator.REINFORCE_PP
        if self.dynamic_sampling and (self.teacher is not None or compares_all):
            raise ValueError(
                "--dynamic-sampling leaves out groups of equal rewards, from which a step learns too with "
                + ("--advantage reinforce_pp" if compares_all else "--teacher")
            )
        if self.environment is not None and (self.prompts is not None or self.reward is not None):
            raise ValueError("--environment has prompts and rewards of its own: leave --prompts out")
        if self.environment is None and json_object(self.environment_settings, "--environment-settings"):
            raise ValueError("--environment-settings needs --environment")
        if self.eval_prompts is not None and self.prompts is None:
            raise ValueError("--eval-prompts needs --prompts")
        if self.reward is not None and self.prompts is None:
            raise ValueError("--prompts and --reward go together, got only the latter")
        if self.prompts is not None and self.reward is None and self.teacher is None:
            raise ValueError("--prompts and --reward go together, unless there is a --teacher")
        if self.rubric is not None and "://" not in (self.reward or ""):
            raise ValueError("--rubric needs the URL of a chat model: --reward http://HOST:PORT")
        self._check_teacher()
        if self.eval_every and self.prompts is not None and self.eval_prompts is None:
            raise ValueError("--eval-every with --prompts needs held-out prompts: --eval-prompts")
        if self.metrics is not None and self.metrics.suffix != ".jsonl":
            raise ValueError(
                f"--metrics must end in .jsonl, after whose stem the run's other files are named, got "
                f"{str(self.metrics)!r}"
            )
        if self.loss is None and json_object(self.loss_settings, "--loss-settings"):
            raise ValueError("--loss-settings needs --loss")
        self.step_settings()

    @property
    def distils(self) -> bool:
        return self.loss in DISTILLING

    @property
    def imitates(self) -> bool:
        return self.teacher is not None and self.loss == "sft"

    def _check_teacher(self) -> None:
        reads = self.distils or self.loss == "sft"
        if self.teacher is None and (self.distils or self.teacher_kl or self.teacher_model):
            raise ValueError(
                f"--loss {'|'.join(DISTILLING)}, --teacher-kl and --teacher-model need --teacher"
            )
        if self.teacher is not None and reads == bool(self.teacher_kl):
            raise ValueError(
                f"--teacher needs --loss {', '.join(DISTILLING)} or sft, which read no advantages, or "
                "--teacher-kl, which is a part of them"
            )
        if re.search(r"@-(?![1-9]\d*$)", self.teacher or ""):
            raise ValueError(f"--teacher: expected NAME@-K, K versions behind, got {self.teacher!r}")

    def step_settings(self) -> "StepSettings":
        from trainers.settings import StepSettings  # its models take 0.2 s to build

        given = {
            "learning_rate": self.learning_rate,
            "updates_per_step": self.updates_per_step,
            "max_grad_norm": self.max_grad_norm,
        }
        loss = {"name": self.loss, **json_object(self.loss_settings, "--loss-settings")}
        return StepSettings.read(given | {"loss": None if self.loss is None else loss})
