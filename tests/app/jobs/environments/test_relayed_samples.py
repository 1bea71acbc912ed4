"""What the relay has kept becomes samples: one for each conversation that only grows."""

from dataclasses import replace

from app.client.completions import Answer
from app.jobs.environments.relay import Exchange, samples
from trainers.trajectory import VersionSpan


def answer(*token_ids: int) -> Answer:
    return Answer(
        text="",
        token_ids=list(token_ids),
        logprobs=[-0.5] * len(token_ids),
        weight_versions=[VersionSpan(version=3, start=0, end=len(token_ids))],
    )


def exchange(prompt: list[int], *token_ids: int) -> Exchange:
    return Exchange(session="s", prompt_token_ids=prompt, answer=answer(*token_ids))


def test_a_conversation_that_grows_is_one_sample() -> None:
    (sample,) = samples([exchange([1, 2], 5, 6), exchange([1, 2, 5, 6, 9], 7)])
    assert (list(sample.prompt_token_ids), list(sample.token_ids)) == ([1, 2], [5, 6, 9, 7])
    assert sample.loss_mask == (True, True, False, True)
    assert sample.logprobs == (-0.5, -0.5, 0.0, -0.5)
    assert [(span.start, span.end) for span in sample.weight_versions] == [(0, 2), (3, 4)]


def test_of_a_conversation_the_turns_that_were_constrained_are_marked() -> None:
    free, forced = exchange([1], 5, 6), replace(exchange([1, 5, 6, 9], 7), constrained=True)
    (sample,) = samples([free, forced])
    assert sample.constrained == (False, False, False, True)
    assert sample.trajectory(1.0).constrained == sample.constrained
    (sample,) = samples([free])
    assert sample.constrained is None


def test_a_conversation_with_an_adapter_has_the_adapters_versions() -> None:
    first, second = (
        Exchange(
            session="s", prompt_token_ids=prompt, answer=replace(answer(token), adapter=f"math@{version}")
        )
        for prompt, token, version in (([1], 5, 8), ([1, 5, 7], 6, 9))
    )
    (sample,) = samples([first, second])
    assert [(span.version, span.start, span.end) for span in sample.weight_versions] == [(8, 0, 1), (9, 2, 3)]


def test_turns_that_were_rendered_anew_are_samples_of_their_own() -> None:
    first, second = samples([exchange([1, 2], 5, 6), exchange([1, 2, 5, 9], 7)])
    assert list(first.token_ids) == [5, 6] and list(second.prompt_token_ids) == [1, 2, 5, 9]


def test_conversations_beside_each_other_are_kept_apart() -> None:
    got = samples([exchange([1], 5), exchange([2], 6), exchange([1, 5, 8], 9), exchange([2, 6, 8], 4)])
    assert [list(each.token_ids) for each in got] == [[5, 8, 9], [6, 8, 4]]
