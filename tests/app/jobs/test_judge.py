"""A judge that is a function: what it is asked, how often, and what follows when it fails."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.client.completions import Answer
from app.client.connection import FleetError
from app.client.program_options import parse
from app.jobs.environments.environment import Problem
from app.jobs.judge import Judge, read_chat, read_pooled
from app.jobs.loading import load_environments
from app.jobs.options import JobOptions
from app.jobs.policy import Unanswered
from tests.app.fake_answers import client_of, refusal
from tests.app.jobs.fake_fleet import CountingTask, FakeFleet, run_job


def conversation(answer: str) -> dict[str, Any]:
    asked = [{"type": "text", "text": "2 + 2?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


class FakeJudge:
    """Rewards an answer by its length."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.refuses: list[httpx.Response | Exception] = []

    async def answer(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "rm"}]})
        body = json.loads(request.content)
        self.asked.append(body)
        if self.refuses:
            refusal = self.refuses.pop(0)
            if isinstance(refusal, Exception):
                raise refusal
            return refusal
        said = body["messages"][-1]["content"]
        if request.url.path == "/pooling":
            return httpx.Response(200, json={"data": [{"data": [float(len(said))]}]})
        score = json.dumps({"reason": "so", "score": len(said.rpartition("\n")[2])})
        return httpx.Response(200, json={"choices": [{"message": {"content": score}}]})

    def judge(self, rubric: str | None = None, **options: Any) -> Judge:
        return Judge(client_of(self.answer, **options), rubric)


async def test_a_reward_model_is_asked_once_for_the_same_conversation() -> None:
    fake = FakeJudge()
    judge = fake.judge()
    asked = [judge({}, "", conversation(answer)) for answer in ("four", "4", "four", "4")]
    assert await asyncio.gather(*asked) == [4.0, 1.0, 4.0, 1.0]
    assert await judge({}, "", conversation("4")) == 1.0 and len(fake.asked) == 2
    assert fake.asked[0] == {"model": "rm", "use_activation": False, **conversation("four")}


async def test_a_chat_model_is_told_the_rubric_and_answers_a_score() -> None:
    fake = FakeJudge()
    assert await fake.judge("Is it right?")({}, "", conversation("four")) == 4.0
    system, user = fake.asked[0]["messages"]
    assert system["content"] == "Is it right?"
    assert user["content"] == "[user]\n2 + 2?\n(image_url)\n\n[assistant]\nfour"
    assert fake.asked[0]["response_format"]["json_schema"]["schema"]["required"] == ["reason", "score"]


async def test_rollouts_wait_for_a_judge_that_is_away() -> None:
    fake = FakeJudge()
    fake.refuses = [httpx.ConnectError("refused"), refusal(503, "unavailable", "loading")]
    judge = fake.judge(patience_s=5.0, retry_pause_s=0.01)
    assert await judge({}, "", conversation("four")) == 4.0 and len(fake.asked) == 3


async def test_one_that_stays_away_is_an_error_and_no_reward() -> None:
    fake = FakeJudge()
    fake.refuses = [refusal(500, "internal", "CUDA error"), httpx.ConnectError("refused")]
    judge = fake.judge()
    for reason in ("500: CUDA error", r"no server answers at http://fleet \(refused\)"):
        with pytest.raises(FleetError, match=rf"the judge rm at http://fleet.*{reason}. No rollout is lost"):
            await judge({}, "", conversation("four"))
    assert await judge({}, "", conversation("four")) == 4.0, "a failure is not kept"


async def test_what_it_refuses_is_left_out_and_a_model_of_no_rewards_ends_the_job() -> None:
    fake = FakeJudge()
    fake.refuses = [
        refusal(400, "invalid", "too long"),
        httpx.Response(200, json={"data": [{"data": [1.0, 2.0]}]}),
    ]
    judge = fake.judge()
    with pytest.raises(Unanswered, match="too long"):
        await judge({}, "", conversation("four"))
    with pytest.raises(
        FleetError, match="expected a reward model, with one number for a conversation, got 2"
    ):
        await judge({}, "", conversation("four"))


@pytest.mark.parametrize("data", [[2.5], [[0.1], [2.5]]], ids=["sequence", "tokens"])
def test_a_score_is_of_the_sequence_or_its_last_token(data: Any) -> None:
    assert read_pooled(json.dumps({"data": [{"data": data}]}).encode(), {}) == 2.5


@pytest.mark.parametrize("said", ['{"score": NaN}', '{"score": null}', '{"reason": "because', "7"])
def test_what_is_no_score_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match="expected JSON with a 'score'"):
        read_chat(json.dumps({"choices": [{"message": {"content": said}}]}).encode(), {})


async def test_a_job_whose_judge_fails_continues_with_the_same_problems(tmp_path: Path) -> None:
    fleet, fake, path = FakeFleet(), FakeJudge(), tmp_path / "m.jsonl"
    judge = fake.judge()

    class Judged(CountingTask):
        async def score(self, problem: Problem, answer: Answer) -> float:
            number = {"role": "assistant", "content": answer.text}
            return await judge({}, "", {"messages": [*problem.messages, number]})

    await run_job(fleet, path, "--steps", "1", task=Judged())
    fake.refuses = [refusal(500, "internal", "CUDA error")]
    with pytest.raises(FleetError, match="CUDA error"):
        await run_job(fleet, path, "--steps", "3", "--resume", task=Judged())
    records = await run_job(fleet, path, "--steps", "3", "--resume", task=Judged())
    rows = [json.loads(line) for line in (tmp_path / "m.rollouts.jsonl").read_text().splitlines()]
    assert {row["problem"] for row in rows} == set(range(6)) and all(row["reward"] > 0 for row in rows)
    assert len(records) == 3 and fleet.ends() == {"consumed": 6}


def test_a_reward_may_be_the_url_of_a_judge(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "2 + 2?"}\n')
    given = ["--prompts", str(tmp_path / "x.jsonl"), "--reward", "http://127.0.0.1:1/v1"]
    options = parse(JobOptions, given)
    learned, _ = load_environments(options)
    assert isinstance(learned._reward, Judge)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="--rubric: expected a text that can be read"):
        load_environments(replace(options, rubric=tmp_path / "none.md"))
    with pytest.raises(ValueError, match="--rubric needs the URL of a chat model"):
        replace(options, rubric=tmp_path / "none.md", reward="mine:length").check()
