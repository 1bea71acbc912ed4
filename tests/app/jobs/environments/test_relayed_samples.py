from dataclasses import replace

from app.client.completions import Answer
from app.jobs.environments.relay import Turn, trajectories
from trainers.trajectory import VersionSpan


def answer(*token_ids: int) -> Answer:
    return Answer(
        text="",
        token_ids=list(token_ids),
        logprobs=[-0.5] * len(token_ids),
        weight_versions=[VersionSpan(version=3, start=0, end=len(token_ids))],
    )


def turn(prompt: list[int], *token_ids: int) -> Turn:
    return Turn(session="s", prompt_token_ids=prompt, answer=answer(*token_ids))


def test_a_conversation_that_grows_is_one_sample() -> None:
    (trajectory,) = trajectories([turn([1, 2], 5, 6), turn([1, 2, 5, 6, 9], 7)])
    assert (list(trajectory.prompt_token_ids), list(trajectory.token_ids)) == ([1, 2], [5, 6, 9, 7])
    assert trajectory.loss_mask == (True, True, False, True)
    assert trajectory.logprobs == (-0.5, -0.5, 0.0, -0.5)
    assert [(span.start, span.end) for span in trajectory.weight_versions] == [(0, 2), (3, 4)]


def test_of_a_conversation_the_turns_that_were_constrained_are_marked() -> None:
    free, forced = turn([1], 5, 6), replace(turn([1, 5, 6, 9], 7), constrained=True)
    (trajectory,) = trajectories([free, forced])
    assert trajectory.constrained == (False, False, False, True)
    (trajectory,) = trajectories([free])
    assert trajectory.constrained is None


def test_a_conversation_with_an_adapter_has_the_adapters_versions() -> None:
    first, second = (
        Turn(session="s", prompt_token_ids=prompt, answer=replace(answer(token), adapter=f"math@{version}"))
        for prompt, token, version in (([1], 5, 8), ([1, 5, 7], 6, 9))
    )
    (trajectory,) = trajectories([first, second])
    assert [(span.version, span.start, span.end) for span in trajectory.weight_versions] == [
        (8, 0, 1),
        (9, 2, 3),
    ]


def test_turns_that_were_rendered_anew_are_samples_of_their_own() -> None:
    first, second = trajectories([turn([1, 2], 5, 6), turn([1, 2, 5, 9], 7)])
    assert list(first.token_ids) == [5, 6] and list(second.prompt_token_ids) == [1, 2, 5, 9]


def test_conversations_beside_each_other_are_kept_apart() -> None:
    got = trajectories([turn([1], 5), turn([2], 6), turn([1, 5, 8], 9), turn([2, 6, 8], 4)])
    assert [list(each.token_ids) for each in got] == [[5, 8, 9], [6, 8, 4]]
