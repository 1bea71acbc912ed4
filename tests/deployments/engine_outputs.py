"""vLLM's outputs of an engine call, as far as they are captured."""

from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any


def sampling_params(
    *, delta: bool, logprobs: int | None = None, grammar: object = None, choices: int = 1
) -> Any:
    """vLLM's `SamplingParams`."""
    numbers = dict.fromkeys(("top_p", "min_p", "repetition_penalty"), 1.0)
    numbers |= dict.fromkeys(("top_k", "presence_penalty", "frequency_penalty"), 0)
    return SimpleNamespace(
        **numbers,
        logprobs=logprobs,
        num_logprobs=logprobs,
        output_kind=SimpleNamespace(name="DELTA" if delta else "FINAL_ONLY"),
        structured_outputs=grammar,
        temperature=0.7,
        seed=None,
        max_tokens=16,
        n=choices,
        routed_experts_prompt_start=0,
    )


async def generated(
    prompt: Sequence[int] | None, answers: Sequence[Sequence[int]], *, delta: bool, routed: Any = None
) -> AsyncGenerator[Any, None]:
    """The outputs of one call: a token of a choice after the other, or all choices at once. A token's
    log-probability is its negative. `routed`: vLLM's array of every answer."""
    whole = []
    for index, tokens in enumerate(answers):
        pieces = [[token] for token in tokens] if delta else [list(tokens)]
        for number, piece in enumerate(pieces, 1):
            last = number == len(pieces)
            span = SimpleNamespace(version="7", start=0, end=len(tokens))
            completion = SimpleNamespace(
                index=index,
                token_ids=piece,
                logprobs=[{token: SimpleNamespace(logprob=-token)} for token in piece],
                cumulative_logprob=-float(sum(piece)),
                finish_reason="stop" if last else None,
                stop_reason=None,
                weight_versions=[span] if last else None,
                routed_experts=routed if last else None,
            )
            if delta:
                yield SimpleNamespace(prompt_token_ids=prompt, num_cached_tokens=0, outputs=[completion])
            else:
                whole.append(completion)
    if whole:
        yield SimpleNamespace(prompt_token_ids=prompt, num_cached_tokens=0, outputs=whole)
