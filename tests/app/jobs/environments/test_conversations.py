import asyncio
import json
from itertools import compress
from typing import Any

import httpx
import pytest

from app.jobs.environments.environment import Conversations, Reply, between
from app.jobs.loading import load_environment
from app.jobs.policy import Moved, Policy, Unanswered
from app.jobs.teacher import SamplingTeacher, Teacher, add_turn
from tests.app.fake_answers import client_of, refusal
from tests.app.jobs.environments.calculator import Calculator
from trainers.trajectory import Trajectory

END, START = 2, 1  # of a turn


def tokens(text: str) -> list[int]:
    return [10 + ord(letter) % 200 for letter in text]


class ChattingFleet:
    """Its template writes START, role, content, END. It answers each turn with the next text."""

    def __init__(self, *says: str) -> None:
        self.says = list(says)
        self.asked: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []
        self.version = 7
        self.drops_words = False  # a template that leaves out what the assistant said before
        self.last_token = END
        self.too_long_from = 1 << 30
        self.refuses_with = "longer than the maximum model length of 80"

    def policy(self, version: int | None = None) -> Policy:
        client = client_of(self.answer)
        return Policy(client=client, model="m", max_tokens=8, version=version, group="r.1")

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        made: list[int] = []
        for message in messages:
            role = message["role"]
            said = "" if self.drops_words and role == "assistant" else message["content"]
            made += [START, *tokens(role[0]), *tokens(said), END]
        return [*made, START, *tokens("a")]

    async def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": self.render(body["messages"])})
        assert request.url.path == "/v1/completions"
        self.asked.append(body)
        self.headers.append(request.headers)
        if len(body["prompt"]) >= self.too_long_from:
            return refusal(400, "x", self.refuses_with)
        said = self.says.pop(0)
        ids = [*tokens(said), self.last_token]
        spans = [{"version": self.version, "start": 0, "end": len(ids)}]
        choice = {
            "text": said,
            "token_ids": ids,
            "weight_versions": spans,
            "finish_reason": "stop",
        }
        self.version += 1
        return httpx.Response(200, json={"choices": [choice]})


CALCULATOR = Conversations(Calculator(digits=2), max_turns=4)


async def test_a_turns_prompt_is_what_was_sampled_and_what_came_after_it() -> None:
    fleet = ChattingFleet("11 + 22", "so 33")
    (rollout,) = await CALCULATOR.rollouts(0, 1, fleet.policy())
    first, second = fleet.asked
    assert second["prompt"][: len(first["prompt"])] == first["prompt"]
    sampled = [*tokens("11 + 22"), END]
    rest = second["prompt"][len(first["prompt"]) :]
    told = fleet.render([{"role": "user", "content": "Calculator: 33. What is the answer?"}])
    assert rest == [*sampled, *told], "the end of the turn is there once"
    assert (rollout.tokens, rollout.turns) == (len(sampled) + len(tokens("so 33")) + 1, 2)
    (name,) = {headers["x-rollout-id"] for headers in fleet.headers}
    assert name == rollout.id and len({headers["x-rollout-turn"] for headers in fleet.headers}) == 2


async def test_an_end_of_turn_that_the_model_did_not_sample_is_told() -> None:
    fleet = ChattingFleet("11 + 22", "33")
    fleet.last_token = 9  # a stop string's
    await CALCULATOR.rollouts(0, 1, fleet.policy())
    first, second = (asked["prompt"] for asked in fleet.asked)
    end = len(first) + len(tokens("11 + 22"))
    assert second[end : end + 2] == [9, END]


async def test_the_turns_of_a_rollout_share_a_session() -> None:
    fleet = ChattingFleet("1", "2", "3", "4")
    await CALCULATOR.rollouts(0, 2, fleet.policy())
    sessions = [headers["x-session-id"] for headers in fleet.headers]
    assert sorted(sessions.count(each) for each in set(sessions)) == [2, 2]


async def test_a_template_that_changes_earlier_turns_is_refused_with_a_sentence() -> None:
    fleet = ChattingFleet("1", "2")
    fleet.drops_words = True
    with pytest.raises(ValueError, match="needs a chat template that writes each message after"):
        await CALCULATOR.rollouts(0, 1, fleet.policy())
    assert between([5, 8, 2, 3], [5, 9, 2, 3]) == [2, 3]
    with pytest.raises(ValueError, match="renders 3 and 4 tokens"):
        between([8, 2, 3], [5, 9, 2, 3])


async def test_answers_of_another_version_are_asked_again_and_then_refused() -> None:
    fleet = ChattingFleet("1", "2", "3", "4", "5", "6")
    assert (await fleet.policy(version=8).complete([1], "s")).newest_version == 8
    assert fleet.headers[0]["x-min-weight-version"] == "8"
    with pytest.raises(Moved, match="expected answers of version 4"):
        await fleet.policy(version=4).complete([1], "s")


async def test_a_conversation_that_gets_too_long_ends() -> None:
    fleet = ChattingFleet("1")
    fleet.too_long_from = 40
    (rollout,) = await CALCULATOR.rollouts(0, 1, fleet.policy())
    assert rollout.reward == 0.0 and rollout.text == "1"
    assert (rollout.turns, rollout.tokens) == (1, 2)


class BadTools:
    """Its tool hangs, or it has a fault."""

    messages = ({"role": "user", "content": "?"},)

    def __init__(self, hangs: bool) -> None:
        self.hangs = hangs

    def start(self, number: int) -> "BadTools":
        return self

    async def reply(self, answer: str) -> Reply:
        if self.hangs:
            await asyncio.sleep(600)
        return Reply(reward={}["no such tool"])


async def test_a_fault_of_the_environment_is_named_with_its_place() -> None:
    with pytest.raises(
        ValueError, match=r"^the environment raised KeyError: 'no such tool' \(test_conversations.py:\d+\)$"
    ):
        await Conversations(BadTools(hangs=False), 3).rollouts(0, 1, ChattingFleet("1").policy())


async def test_a_reply_that_times_out_leaves_the_problem_out() -> None:
    hanging = Conversations(BadTools(hangs=True), 3, reply_timeout_s=0.05)
    with pytest.raises(Unanswered, match=r"reply took longer than 0\.05 s"):
        await hanging.rollouts(0, 1, ChattingFleet("1").policy())


def test_environments_are_found_by_their_path() -> None:
    calculator = "tests.app.jobs.environments.calculator:Calculator"
    assert load_environment(calculator, {"digits": 4}) == Calculator(digits=4)
    for path, settings, message in (
        ("nothing", {}, "must look like package.module:factory, or be 'verifiers'"),
        ("app.jobs.nowhere:x", {}, "cannot be imported"),
        (calculator, {"digits": 99}, "digits must lie in"),
        (calculator, {"colour": 1}, "refuses"),
        ("builtins:dict", {}, "start\\(number\\)"),
    ):
        with pytest.raises(ValueError, match=message):
            load_environment(path, settings)


async def test_what_a_teacher_says_in_several_turns_is_one_sequence() -> None:
    fleet = ChattingFleet("11 + 22", "so 33", "44 + 55")
    teacher = Teacher(client=client_of(fleet.answer), model="big", top_k=0, kl=0.0)
    policy = SamplingTeacher(
        client=teacher.client, model="big", max_tokens=8, student=fleet.policy(), teacher=teacher
    )
    (rollout,) = await CALCULATOR.rollouts(0, 1, policy)
    (sequence,) = policy.made[rollout.id]
    first, second = (asked["prompt"] for asked in fleet.asked)
    said = [*tokens("11 + 22"), END], [*tokens("so 33"), END]
    assert sequence.prompt_token_ids == tuple(first)
    assert sequence.token_ids == (*second[len(first) :], *said[1])
    assert sequence.loss_mask is not None
    assert list(compress(sequence.token_ids, sequence.loss_mask)) == [*said[0], *said[1]]
    assert len(sequence.logprobs) == len(sequence.token_ids)
    fleet.too_long_from = len(first) + 1
    (cut,) = await CALCULATOR.rollouts(0, 1, policy)
    assert (cut.turns, len(policy.made[cut.id])) == (1, 1), "the conversation ends, and the job goes on"


async def test_turns_that_rewrite_what_was_said_are_sequences_of_their_own() -> None:
    made: list[Trajectory] = []
    for prompt, sampled in (((1, 2), (3,)), ((1, 2, 4), (5,)), ((1, 2, 3, 6), (7, 8))):
        add_turn(made, prompt, sampled)
    other, longer = made
    assert (other.prompt_token_ids, other.token_ids) == ((1, 2, 4), (5,))
    assert (longer.prompt_token_ids, longer.token_ids) == ((1, 2), (3, 6, 7, 8))
    assert longer.loss_mask == (True, False, True, True)
