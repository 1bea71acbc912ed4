"""The RL job's options: each one is a field of `JobOptions`, and typer makes the command line of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from app.client.program_options import LOCAL_URL, Url, json_object
from app.jobs.environments.environment import (
    BUILT_IN,
    Conversations,
    Environment,
    Single,
    load_environment,
)
from app.jobs.environments.verifiers import Verifiers, VerifiersSettings
from app.jobs.metrics import Tracking
from app.jobs.rewards import load_reward
from app.jobs.tasks import Extraction, PromptFileTask, ReasoningGymTask
from trainers.advantages import AdvantageEstimator

DEFAULT_TASK_SETTINGS = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """GRPO against a running fleet: sample, score, step, publish."""

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
        typer.Option(help="stop string; repeatable", show_default="a line break"),
    ] = None
    max_staleness: Annotated[int, typer.Option(min=0, help="versions that a batch may be behind")] = 2
    advantage: Annotated[AdvantageEstimator, typer.Option(help="formula")] = AdvantageEstimator.GRPO
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
        str | None, typer.Option(help="package.module:function(entry, answer) -> float, for --prompts")
    ] = None
    environment: Annotated[
        str | None,
        typer.Option(
            help="instead of --task: calculator, verifiers (docs/guides/environments.md), package.module:name"
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
    publish_best: Annotated[
        bool,
        typer.Option(
            "--publish-best", help="move the fleet to it at the end; needs security.checkpoint_roots"
        ),
    ] = False
    log: Annotated[
        list[Tracking] | None,
        typer.Option(help="also write metrics there; repeatable", show_default="none"),
    ] = None
    seed: Annotated[int, typer.Option(help="seed of the problems")] = 0
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

    @property
    def longest(self) -> int:
        """Tokens that the model may sample in a rollout."""
        return self.max_tokens * (1 if self.environment is None else self.max_turns)

    def load_environments(self) -> tuple[Environment, Environment]:
        """The environment that is learned from, and that of the held-out problems."""
        self._check()
        if self.environment is None:
            return self._single_turn()
        settings = json_object(self.environment_settings, "--environment-settings")
        if self.environment == "verifiers":
            return self._verifiers(settings)
        if self.environment in BUILT_IN:
            settings = {"seed": self.seed} | settings
        talks = Conversations(load_environment(self.environment, settings), self.max_turns)
        return talks, talks

    def _check(self) -> None:
        if self.eval_every == 0 and (self.keep_best is not None or self.publish_best):
            raise ValueError("--keep-best and --publish-best need --eval-every")
        if self.publish_best and self.keep_best is None:
            raise ValueError("--publish-best needs --keep-best")
        if self.overlong_buffer > self.longest:
            raise ValueError(
                f"--overlong-buffer must be at most {self.longest} tokens, got {self.overlong_buffer}"
            )
        if self.environment is not None and (self.prompts is not None or self.reward is not None):
            raise ValueError("--environment has prompts and rewards of its own: leave --prompts out")
        if (self.prompts is None) != (self.reward is None):
            raise ValueError("--prompts and --reward go together, got only one of them")
        if self.eval_every and self.prompts is not None and self.eval_prompts is None:
            raise ValueError("--eval-every with --prompts needs held-out prompts: --eval-prompts")

    def _verifiers(self, given: Mapping[str, Any]) -> tuple[Environment, Environment]:
        try:
            settings = VerifiersSettings.model_validate(given)
        except ValidationError as error:
            wrong = "; ".join(f"{each['loc'][0]}: {each['msg']}" for each in error.errors())
            raise ValueError(f"--environment-settings of verifiers: {wrong}") from error
        learned = Verifiers(settings)
        return learned, Verifiers(settings.held_out()) if self.eval_every else learned

    def _single_turn(self) -> tuple[Environment, Environment]:
        if self.prompts is None or self.reward is None:
            settings = json_object(self.task_settings, "--task-settings")
            task = ReasoningGymTask(
                self.task, settings, instruction=self.instruction, seed=self.seed, extract=self.extract
            )
            return Single(task), Single(task)
        reward = load_reward(self.reward)
        learned = Single(PromptFileTask(self.prompts, reward, extract=self.extract))
        if self.eval_prompts is None:
            return learned, learned
        return learned, Single(PromptFileTask(self.eval_prompts, reward, extract=self.extract))
