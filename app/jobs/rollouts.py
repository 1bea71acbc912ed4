"""How answers are sampled from the fleet, and what a trainer needs of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.client.completions import Answer, Completion, chat
from app.client.connection import Call, FleetError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Samples from the model's own distribution, so that log-probabilities are those of the policy.

    Every setting that changes the distribution is given: vLLM fills in the others from the model's
    generation_config.json.
    """

    answers: int
    max_tokens: int
    stop: Sequence[str] = ()

    def call(self, model: str, messages: Sequence[Mapping[str, str]]) -> Call[Completion]:
        """The chat completion of one prompt."""
        return chat(
            {
                "model": model,
                "messages": list(messages),
                "n": self.answers,
                "max_tokens": self.max_tokens,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "stop": list(self.stop),
                "logprobs": True,
                "return_token_ids": True,
            }
        )


def require_complete(completion: Completion) -> Sequence[Answer]:
    """The answers, each with everything that a trainer needs.

    Raises:
        FleetError: something is missing; the message names it.
    """
    if not completion.prompt_token_ids:
        raise FleetError("the fleet's answer has no prompt_token_ids")
    for answer in completion.answers:
        parts = {
            "token_ids": answer.token_ids,
            "logprobs": answer.logprobs,
            "weight_versions": answer.weight_versions,
        }
        if missing := [name for name, value in parts.items() if not value]:
            raise FleetError(f"a choice of the fleet's answer has no {', '.join(missing)}")
        if len(answer.token_ids) != len(answer.logprobs):
            raise FleetError(
                f"a choice has {len(answer.token_ids)} token ids but {len(answer.logprobs)} log-probabilities"
            )
    return completion.answers
