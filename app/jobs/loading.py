from collections.abc import Mapping

from pydantic import ValidationError

from app.client.program_options import json_object
from app.jobs.environments.environment import Conversations, Environment, TurnEnvironment
from app.jobs.environments.verifiers import Verifiers, VerifiersSettings
from app.jobs.judge import Judge
from app.jobs.options import JobOptions
from app.jobs.rewards import Reward, load_reward, no_reward
from app.jobs.tasks import PromptFileTask, ReasoningGymTask
from app.jobs.user_code import imported
from trainers.settings import wrong_fields


def load_environments(options: JobOptions) -> tuple[Environment, Environment]:
    options.check()
    if options.environment is None:
        return _single_turn(options)
    settings = json_object(options.environment_settings, "--environment-settings")
    if options.environment == "verifiers":
        try:
            learned = Verifiers(of_verifiers := VerifiersSettings.model_validate(settings))
        except ValidationError as error:
            raise ValueError(f"--environment-settings of verifiers: {wrong_fields(error)}") from error
        return learned, Verifiers(of_verifiers.held_out()) if options.eval_every else learned
    made = load_environment(options.environment, settings)
    talks = Conversations(made, options.max_turns, options.reward_timeout)
    return talks, talks


def load_environment(path: str, settings: Mapping[str, object]) -> TurnEnvironment:
    """`settings` are arguments of its factory."""
    factory = imported(path, "--environment", "package.module:factory, or be 'verifiers'")
    try:
        made: TurnEnvironment = factory(**settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--environment {path!r} refuses {dict(settings)}: {error}") from error
    if not callable(getattr(made, "start", None)):
        raise ValueError(f"--environment {path!r} must make an object with start(number), got {made!r}")
    return made


def _reward(options: JobOptions, path: str) -> Reward:
    timeout_s = options.reward_timeout
    if "://" not in path:
        return load_reward(path, processes=options.reward_processes, timeout_s=timeout_s)
    try:
        rubric = None if options.rubric is None else options.rubric.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--rubric: expected a text that can be read, got {options.rubric}: {error}"
        ) from error
    return Judge.connect(path, rubric, timeout_s)


def _single_turn(options: JobOptions) -> tuple[Environment, Environment]:
    if options.prompts is None:
        settings = json_object(options.task_settings, "--task-settings")
        task = ReasoningGymTask(
            options.task,
            settings,
            instruction=options.instruction,
            seed=options.seed,
            extract=options.extract,
        )
        return task, task
    reward: Reward = no_reward
    if options.reward is not None:
        reward = _reward(options, options.reward)
    learned = PromptFileTask(options.prompts, reward, extract=options.extract)
    if options.eval_prompts is None:
        return learned, learned
    return learned, PromptFileTask(options.eval_prompts, reward, extract=options.extract)
