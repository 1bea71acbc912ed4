"""A teacher that is a function: what is asked, what the trainer gets, and what a failure does not lose."""

import json
from base64 import b64decode, b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from app.client import completions
from app.client.connection import FleetError
from app.jobs.policy import Policy, Unanswered
from app.jobs.teacher import SamplingTeacher, Teacher, read_scores
from tests.app.fake_answers import client_of, refusal
from tests.app.jobs.fake_fleet import FakeFleet, run_job
from tests.trainers import tiny


def row(**logprobs: float) -> dict[str, Any]:
    """As vLLM has them: k tokens, and the prompt's own one where it is not among them."""
    return {token.removeprefix("t"): {"logprob": value, "rank": 1} for token, value in logprobs.items()}


def scored(rows: list[Any]) -> bytes:
    return json.dumps({"choices": [{"prompt_logprobs": [None, *rows]}]}).encode()


class FakeTeacher:
    """Says of every token that it has -1.5, of others that they are likelier."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.is_down = False
        self.row = row(t8=-0.5, t9=-1.0, t7=-1.5)
        self.probe = [5, 6]
        self.refused: dict[int, str] = {}  # by the last token of a prompt
        self.expanded: list[int] = []  # a prompt, by its processor

    def answer(self, request: httpx.Request) -> httpx.Response:
        if self.is_down:
            return refusal(500, "internal", "CUDA error")
        asked = json.loads(request.content or b"{}")
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": self.probe})
        self.asked.append(asked)
        if (why := self.refused.get(asked.get("prompt", [-1])[-1])) is not None:
            return refusal(400, "invalid_request", why)
        if "content_parts" in asked:
            rows = [self.row | row(**{f"t{token}": -1.5}) for token in self.expanded[1:]]
            body = {"prompt_logprobs": [None, *rows], "prompt_token_ids": self.expanded}
            return httpx.Response(200, json=body | {"choices": [{}]})
        if "prompt_logprobs" in asked:
            rows = [self.row | row(**{f"t{token}": -1.5}) for token in asked["prompt"][1:]]
            return httpx.Response(200, content=scored(rows))
        choice = {"text": "42", "token_ids": [4, 2], "finish_reason": "stop"}
        return httpx.Response(200, json={"choices": [choice] * asked.get("n", 1), "prompt_token_ids": [3, 1]})

    def teacher(self, *, top_k: int = 2, kl: float = 0.0, model: str = "big") -> Teacher:
        return Teacher(client=client_of(self.answer), model=model, top_k=top_k, kl=kl)


def test_the_most_probable_tokens_and_the_own_one_are_read() -> None:
    rows = [row(t1=-1.0), row(t7=-0.1, t8=-3.0), row(t9=-4.0, t8=-0.2, t7=-2.0)]
    teacher, own = read_scores(scored(rows), [1, 1, 7, 9], 2, 2)
    assert own == [-0.1, -4.0] and teacher.top_k == 2
    assert np.frombuffer(teacher.token_ids, np.int32).tolist() == [7, 8, 8, 7]
    assert np.frombuffer(teacher.logprobs, np.float32) == pytest.approx([-0.1, -3.0, -0.2, -2.0])
    assert read_scores(scored(rows), [1, 1, 7, 9], 2, 0)[1] == own


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(t7=-1.0)], "expected prompt_logprobs of 3 tokens, got 2"),
        ([row(t7=-1.0, t8=-2.0), row(t8=-1.0, t9=-2.0)], "and that of token 7, got"),
        ([row(t7=-1.0, t8=-2.0), row(t7=-1.0)], "expected 2 finite log-probabilities"),
        ([row(t7=-1.0, t8=-2.0), row(t7=-1.0, t8=float("nan"))], "expected 2 finite log-probabilities"),
    ],
)
def test_an_answer_that_is_not_of_these_tokens_is_refused(rows: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_scores(scored(rows), [1, 7, 7], 1, 2)


async def test_the_trainer_gets_what_the_teacher_says_of_every_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, fake = FakeFleet(), FakeTeacher()
    fleet.same = True  # rewards are equal, and teach nothing themselves
    fleet.metrics = {"loss": 0.5, "effective_sample_fraction": 0.01}
    (record,) = await run_job(
        fleet, tmp_path / "m.jsonl", "--steps", "1", "--teacher", "a", "--loss", "jsd", teacher=fake.teacher()
    )
    (batch,) = fleet.batches
    assert len(batch) == 6 and all(each.teacher is not None for each in batch)
    assert batch[0].teacher is not None
    assert np.frombuffer(batch[0].teacher.token_ids, np.int32).tolist() == [8, 9] * 2
    assert fake.asked[0] == {"model": "big", "prompt": [1, 2, 7, 7], "max_tokens": 1, "prompt_logprobs": 2}
    assert record.teacher_kl == pytest.approx(-1.0 + 1.5) and record.teacher_s > 0
    assert "KL to the teacher 0.5000" in record.line(1, None) and record.left_out_fraction == 0.0
    assert "importance weights" not in capsys.readouterr().out, "a divergence reads none"


async def test_the_kl_to_the_teacher_is_a_part_of_each_tokens_advantage(tmp_path: Path) -> None:
    fleet, fake = FakeFleet(), FakeTeacher()
    teacher, asked = fake.teacher(top_k=0, kl=2.0), ("--teacher", "a", "--teacher-kl", "2")
    await run_job(
        fleet, tmp_path / "m.jsonl", "--steps", "1", *asked, "--advantage", "dr_grpo", teacher=teacher
    )
    (batch,) = fleet.batches
    assert {each.advantage for each in batch} == {(-2.0,), (-1.0,) * 2, (0.0,) * 3}, "rewards are 1, 2 and 3"
    assert batch[0].teacher is None and fake.asked[0]["prompt_logprobs"] == 0


async def test_a_teacher_reads_the_images_that_the_policy_has_read() -> None:
    fake = FakeTeacher()
    fake.probe, fake.expanded = [8], [3, 8, 8, 8, 4, 8, 8, 9, 5, 8, 8]
    each = replace(tiny.trajectory(tuple(fake.expanded[:8]), (5, 8, 8)), images=(b"first", b"second"))
    (scored,), _ = await fake.teacher().score([each], 1)
    (asked,) = fake.asked
    assert asked["token_ids"] == [3, 8, 4, 8, 9, 5, 8, 8], "what was sampled stands for no image"
    urls = [part["url"].partition(",")[2] for part in asked["content_parts"]]
    assert [b64decode(url) for url in urls] == [b"first", b"second"]
    assert scored.teacher is not None and len(scored.teacher.token_ids) == 4 * 2 * 3
    fake.expanded[3] = 4
    with pytest.raises(FleetError, match="expected a processor that places images as the policy's does"):
        await fake.teacher().score([each], 1)
    fake.probe = [5, 6]
    with pytest.raises(FleetError, match="expected one that reads images"):
        await fake.teacher().score([each], 1)


def sampling(fake: FakeTeacher) -> SamplingTeacher:
    student = Policy(client=client_of(fake.answer), model="small", max_tokens=4)
    return SamplingTeacher(
        client=student.client, model="big", max_tokens=4, student=student, teacher=fake.teacher()
    )


async def test_of_an_agents_request_the_prompt_is_what_the_teacher_has_read() -> None:
    policy = sampling(FakeTeacher())
    await policy.forward(completions.chat({"messages": [{"role": "user", "content": "?"}]}), "", "a")
    (sequence,) = policy.made["a"]
    assert (sequence.prompt_token_ids, sequence.token_ids) == ((3, 1), (4, 2))


async def test_a_teacher_that_samples_sees_the_images_and_the_trainer_gets_their_files() -> None:
    fake = FakeTeacher()
    policy = sampling(fake)

    def messages(url: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]

    seen = messages(f"data:image/png;base64,{b64encode(b'picture').decode()}")
    assert len(await policy.chat(seen, ["a", "b"])) == 2
    assert (fake.asked[0]["messages"], fake.asked[0]["n"]) == (seen, 2)
    for (sequence,) in (policy.made["a"], policy.made["b"]):
        assert sequence.prompt_token_ids == (3, 1), "as the teacher's processor expanded it"
        assert (sequence.token_ids, sequence.images) == ((4, 2), (b"picture",))
    fake.refused = {-1: "cannot identify image file"}
    with pytest.raises(Unanswered, match="cannot identify"):
        await policy.chat(seen, ["c"])
    with pytest.raises(ValueError, match=r"expected files or data URLs .*\(--loss sft\), got 'https://a/b'"):
        await policy.chat(messages("https://a/b"), ["d"])


async def test_a_teacher_that_is_down_loses_nothing(tmp_path: Path) -> None:
    fleet, fake = FakeFleet(), FakeTeacher()
    asked = ("--steps", "2", "--teacher", "a", "--loss", "reverse_kl")
    fake.is_down = True
    with pytest.raises(FleetError, match=r"the teacher big at http://fleet: .*CUDA error. Nothing is lost"):
        await run_job(fleet, tmp_path / "m.jsonl", *asked, teacher=fake.teacher())
    sampled, fake.is_down = dict(fleet.asked_for), False
    records = await run_job(fleet, tmp_path / "m.jsonl", *asked, "--resume", teacher=fake.teacher())
    assert len(records) == 2 and fleet.ends() == {"consumed": 4}
    assert {prompt: fleet.asked_for[prompt] for prompt in list(sampled)[:2]} == dict.fromkeys(
        list(sampled)[:2], 3
    )


async def test_a_teachers_token_that_the_trainer_has_not_ends_the_job(tmp_path: Path) -> None:
    class Refusing(FakeFleet):
        async def answer(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/train/step":
                return refusal(400, "invalid_request", "trajectory 0: teacher: token_ids must lie in [0, 40)")
            return await super().answer(request)

    with pytest.raises(FleetError, match="teacher: token_ids must lie"):
        await run_job(
            fleet := Refusing(),
            tmp_path / "m.jsonl",
            *("--steps", "1", "--teacher", "a", "--loss", "jsd"),
            teacher=FakeTeacher().teacher(),
        )
    assert not (tmp_path / "m.rollouts.jsonl").read_text().count('"step": 2') and fleet.labels == []


class Rendering(FakeFleet):
    async def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/tokenize":
            return httpx.Response(
                200, json={"tokens": [3, int(json.loads(request.content)["messages"][0]["content"])]}
            )
        assert "/rollouts/" not in request.url.path or "runs" in request.url.path
        return await super().answer(request)


async def test_the_teacher_answers_in_the_policys_place(tmp_path: Path) -> None:
    fleet, fake, path = Rendering(), FakeTeacher(), tmp_path / "m.jsonl"
    asked = ("--teacher", "a", "--loss", "sft")
    (record,) = await run_job(fleet, path, "--steps", "1", *asked, teacher=fake.teacher())
    assert record.reward == 2.0 and fleet.asked_for == {}
    records = await run_job(fleet, path, "--steps", "2", *asked, "--resume", teacher=fake.teacher())
    prompts = [[each.prompt_token_ids for each in batch] for batch in fleet.batches]
    assert prompts == [[(3, 0)] * 3 + [(3, 1)] * 3, [(3, 2)] * 3 + [(3, 3)] * 3]
    assert {each.token_ids for batch in fleet.batches for each in batch} == {(4, 2)}
    assert fake.asked[0]["prompt"] == [3, 0] and fake.asked[0]["n"] == 3 and records[-1].staleness_max == 0


async def test_a_prompt_that_is_too_long_for_the_teacher_is_left_out(tmp_path: Path) -> None:
    """Each --resume would begin with it."""
    fake, fleet = FakeTeacher(), Rendering()
    fake.refused = dict.fromkeys((0, 1, 2), "This model's maximum context length is 8 tokens")
    asked = ("--teacher", "a", "--loss", "sft")  # two problems of each step
    (record,) = await run_job(fleet, tmp_path / "run.jsonl", "--steps", "1", *asked, teacher=fake.teacher())
    prompts = [each.prompt_token_ids for each in fleet.batches[0]]
    assert (record.unanswered, record.next_problem, prompts) == (3, 4, [(3, 3)] * 3)


async def test_an_answer_that_is_too_long_for_the_teacher_is_left_out() -> None:
    """It asks for one token more: an answer that fills the context is one. Each --resume would score it."""
    fake = FakeTeacher()
    fake.refused = {4: "This model's maximum context length is 3 tokens"}
    batch = [tiny.trajectory((1, 2), (token,)) for token in (3, 4)]
    scored_ones, _ = await fake.teacher().score(batch, 1)
    assert [each.token_ids for each in scored_ones] == [(3,)]
    assert await fake.teacher().score(batch[1:], 1) == ([], 0.0)


async def test_a_teacher_with_another_vocabulary_is_refused() -> None:
    fake = FakeTeacher()
    policy = Policy(client=client_of(fake.answer), model="small", max_tokens=4)
    await fake.teacher().check(policy, 3)
    other = FakeTeacher()
    other.probe = [5, 7]
    with pytest.raises(ValueError, match=r"small's vocabulary, got big: .* 2 tokens .*\[5, 6\].* \[5, 7\]"):
        await other.teacher().check(policy, 3)


@pytest.mark.parametrize(("trained", "is_adapter"), [("math2", True), ("math", False)])
async def test_only_the_adapter_that_is_trained_lags(trained: str, is_adapter: bool) -> None:
    """The versions of another one have numbers of their own."""
    fake = FakeTeacher()
    policy = Policy(client=client_of(fake.answer), model="math", max_tokens=4, is_adapter=True)
    await fake.teacher(model="math@-2").check(policy, 3)
    policy = replace(policy, model=trained, is_adapter=is_adapter)
    with pytest.raises(ValueError, match=f"got 'math@-2', and '{trained}' is trained"):
        await fake.teacher(model="math@-2").check(policy, 3)


async def test_a_token_that_is_missing_is_said_by_its_own_name() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return refusal(401, "unauthorized", "no token")

    teacher = Teacher(client=client_of(answer), model="big", top_k=1, kl=0.0)
    with pytest.raises(FleetError, match="expected in SLIPSTREAM_TEACHER_TOKEN") as refused:
        await teacher.score([tiny.trajectory((1, 2), (3,))], 1)
    assert refused.value.status is None, "else the fleet's own token would be asked for"


def test_a_lagging_teacher_is_an_earlier_version() -> None:
    names = [FakeTeacher().teacher(model="math@-3").name(version) for version in (2, 4, 9)]
    assert names == ["math@1", "math@1", "math@6"]
    assert FakeTeacher().teacher(model="math@7").name(9) == "math@7"
