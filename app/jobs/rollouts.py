"""How answers are sampled from the fleet, and what a trainer needs of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.client.completions import Completion, chat
from app.client.connection import AsyncFleetClient, Call, FleetError

ATTEMPTS = 3  # for one prompt


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


class Unanswered(Exception):
    """The fleet does not answer this prompt; the text says why. Others may be answered."""


async def sample(client: AsyncFleetClient, call: Call[Completion]) -> Completion:
    """A completion whose answers all ended by themselves.

    The fleet may cut answers off: at an update with `in_flight: abort`, at a pause, at `/abort_requests`. A
    part of an answer has no reward. All answers to the prompt are then sampled again, also those that had
    ended: they would be short ones more often than not.

    Raises:
        Unanswered: each attempt was cut off, or the fleet refuses this request for good.
        FleetError: the fleet refuses, or an answer lacks something that a trainer needs.
    """
    for _ in range(ATTEMPTS):
        try:
            completion = await client.send(call)
        except FleetError as error:
            if error.type == "deadly_request":
                raise Unanswered(error.message) from error
            raise
        if not any(answer.aborted for answer in completion.answers):
            require_complete(completion)
            return completion
    raise Unanswered(f"the fleet aborted its answers {ATTEMPTS} times")


def require_complete(completion: Completion) -> None:
    """Check that each answer has everything that a trainer needs.

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
            "finish_reason": answer.finish_reason,
        }
        if missing := [name for name, value in parts.items() if not value]:
            raise FleetError(f"a choice of the fleet's answer has no {', '.join(missing)}")
        if len(answer.token_ids) != len(answer.logprobs):
            raise FleetError(
                f"a choice has {len(answer.token_ids)} token ids but {len(answer.logprobs)} log-probabilities"
            )
