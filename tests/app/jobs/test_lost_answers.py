import json
import re
from contextlib import suppress
from pathlib import Path
from random import Random

import httpx
import pytest

from app.client.connection import FleetError
from app.jobs import metrics
from tests.app.fake_answers import refusal
from tests.app.jobs import fake_fleet
from tests.app.jobs.fake_fleet import FakeFleet, run_job
from tests.deployments.rollouts.turns import request


@pytest.mark.parametrize("call", ["step", "publish"])
async def test_what_was_done_before_its_answer_was_lost_is_not_done_again(
    tmp_path: Path, call: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = FakeFleet()
    fleet.loses[call] = 1
    records = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "2")
    assert len(fleet.batches) == 2 and fleet.labels == ["1", "2"]
    assert [record.version for record in records] == [5, 6]
    assert capsys.readouterr().out.count("asking the trainer whether it was done") == 1


async def test_a_step_that_arrives_after_it_was_sent_again_is_not_learned_from_twice(tmp_path: Path) -> None:
    """A router that waits for a new trainer does not know that its client has gone."""

    class LateFleet(FakeFleet):
        late: httpx.Request | None = None

        async def answer(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/train/step" and not self.batches:
                if self.late is None:
                    self.late = request
                    raise httpx.RemoteProtocolError("the server disconnected", request=request)
                await super().answer(self.late)
            return await super().answer(request)

    fleet = LateFleet()
    records = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "2")
    assert len(fleet.batches) == 2 and [record.trainer["step"] for record in records] == [4, 5]


async def test_a_step_of_many_tokens_is_taken_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.rollouts.store.MAX_TAKEN", 1)
    fleet = FakeFleet()
    records = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "2")
    assert [record.groups for record in records] == [2, 2] and fleet.ends() == {"consumed": 4}


async def test_a_restarting_trainer_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = FakeFleet()
    fleet.restarts = 2
    records = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "2")
    assert [record.version for record in records] == [5, 6] and len(fleet.batches) == 2
    out = capsys.readouterr().out
    assert out.count("/train/step: trying again for up to 10 s") == 1


async def test_a_step_lost_before_its_round_is_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = FakeFleet()
    fleet.dies_before_publishing = 1
    records = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "2")
    assert len(fleet.batches) == 3 and fleet.batches[0] == fleet.batches[1]
    assert fleet.labels == ["1", "2"] and [record.version for record in records] == [5, 6]
    assert [record.trainer["step"] for record in records] == [4, 5]
    out = capsys.readouterr().out
    assert "step 1: POST /train/publish: 409: got one after step 3; asking the trainer" in out


async def test_a_trainer_that_comes_back_older_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was told to replace the version that it had published, and has not got."""

    class Older(FakeFleet):
        is_new = True

        async def answer(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/train/step" and self.labels == ["1"] and self.is_new:
                self.steps, self.is_new = self.steps - 1, False
            return await super().answer(request)

    await run_job(Older(), tmp_path / "m.jsonl", "--steps", "2")
    out = capsys.readouterr().out
    assert out.count("this was its step 4, and its step 4 was published before") == 1


@pytest.mark.parametrize(
    "missed", [None, "the trainer has version 3, and version 4 is committed: it is lost"]
)
async def test_a_job_does_not_begin_with_a_trainer_that_has_another_version_than_the_fleet(
    tmp_path: Path, missed: str | None
) -> None:
    fleet = FakeFleet()
    fleet.trainer_version, fleet.missed = 3, missed
    expected = missed or "the fleet serves version 4, and its trainer has version 3: `slipstream rollback 4`"
    with pytest.raises(FleetError, match=re.escape(expected)):
        await run_job(fleet, tmp_path / "m.jsonl", "--steps", "2")
    assert not fleet.batches


async def test_a_publish_that_arrives_while_a_job_begins_is_no_other_programs(tmp_path: Path) -> None:
    class Publishing(FakeFleet):
        """It ends between the job's questions."""

        asked = 0

        async def answer(self, request: httpx.Request) -> httpx.Response:
            answer = await super().answer(request)
            self.asked += request.url.path == "/train/status"
            self.version += request.url.path == "/train/status" and self.asked == 1
            return answer

    records = await run_job(Publishing(), tmp_path / "m.jsonl", "--steps", "1")
    assert [record.version for record in records] == [6]


@pytest.mark.parametrize("path", ["/train/step", "/train/publish"])
async def test_steps_of_another_job_are_not_taken_for_this_runs(path: str, tmp_path: Path) -> None:
    class Shared(FakeFleet):
        async def answer(self, request: httpx.Request) -> httpx.Response:
            self.steps += request.url.path == path
            return await super().answer(request)

    with pytest.raises(FleetError, match="another job trains it"):
        await run_job(Shared(), tmp_path / "m.jsonl", "--steps", "2")


async def test_a_trainer_that_loses_each_step_ends_the_run(tmp_path: Path) -> None:
    fleet = FakeFleet()
    fleet.dies_before_publishing = 100
    with pytest.raises(FleetError, match="409: got one after step 3"):
        await run_job(fleet, tmp_path / "m.jsonl", "--steps", "2")
    assert fleet.labels == []


async def test_a_step_longer_than_the_retry_deadline_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.jobs.training.POLL_S", 0.02)
    fleet = BusyFleet()
    fleet.loses["step"] = 1
    records = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "1")
    assert len(fleet.batches) == 1 and [record.version for record in records] == [5]


async def test_a_trainer_that_stays_busy_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.jobs.training.BUSY_S", 0.1)
    monkeypatch.setattr("app.jobs.training.POLL_S", 0.02)
    fleet = FakeFleet()
    fleet.busy = 1000
    with pytest.raises(FleetError, match="the trainer is not free, and has been busy with 'step' for"):
        await run_job(fleet, tmp_path / "m.jsonl", "--steps", "1")
    assert fleet.batches == []


class BusyFleet(FakeFleet):
    """Its trainer continues a step whose answer was lost."""

    def lose(self, call: str, request: httpx.Request) -> None:
        self.busy = 10
        super().lose(call, request)


class Killed(Exception):
    """The job, where a test kills it."""


class KillingFleet(FakeFleet):
    """The job does not live to see the answer to one of its calls, done or not."""

    def __init__(self, path: str, *, done: bool) -> None:
        super().__init__()
        self.kills: str | None = path
        self.done = done

    async def answer(self, request: httpx.Request) -> httpx.Response:
        kills = self.kills == request.url.path and len(self.labels) == 1
        answer = await super().answer(request) if self.done or not kills else None
        if answer is None or kills:
            self.kills = None
            raise Killed
        return answer


@pytest.mark.parametrize(
    ("path", "done"),
    [("/train/step", True), ("/train/step", False), ("/train/publish", True), ("/train/publish", False)],
)
async def test_a_job_that_was_killed_in_a_step_learns_from_each_problem_once(
    path: str, done: bool, tmp_path: Path
) -> None:
    fleet = KillingFleet(path, done=done)
    with pytest.raises(Killed):
        await run_job(fleet, tmp_path / "m.jsonl", "--steps", "4")
    assert len(metrics.records(tmp_path / "m.jsonl")) == 1
    records = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "4", "--resume")
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert len(fleet.batches) == 4, "one batch a step, and none twice"
    assert fleet.labels == ["1", "2", "3", "4"]
    assert [record.version for record in records] == [5, 6, 7, 8]
    before, resumed, after, _ = records
    assert resumed.trainer["loss"] == 0.5 and resumed.reward_std > 0.0 and resumed.groups == 2
    assert before.ended < resumed.ended < after.ended
    assert before.elapsed_s < resumed.elapsed_s < after.elapsed_s
    assert_all_accounted_for(fleet, tmp_path / "m.jsonl", steps=4)


async def test_a_killed_jobs_step_may_arrive_while_the_next_job_takes_its_batch(tmp_path: Path) -> None:
    """A router that waits for a new trainer does not know that its client has gone."""

    class LateStep(KillingFleet):
        late: httpx.Request | None = None

        async def answer(self, request: httpx.Request) -> httpx.Response:
            if self.kills == request.url.path and len(self.labels) == 1:
                self.late = request
            answer = await super().answer(request)
            if request.url.path == "/rollouts/take" and self.late is not None and self.kills is None:
                late, self.late = self.late, None
                await super().answer(late)
            return answer

    fleet = LateStep("/train/step", done=False)
    with pytest.raises(Killed):
        await run_job(fleet, tmp_path / "m.jsonl", "--steps", "2")
    records = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "2", "--resume")
    assert len(fleet.batches) == 2, "one batch a step, and none twice"
    assert [record.trainer["step"] for record in records] == [4, 5]


@pytest.mark.parametrize("done", [True, False])
async def test_a_run_goes_on_after_another_one_has_trained(done: bool, tmp_path: Path) -> None:
    """Its newest batch was taken before that, and learned from or not."""
    for others in (1, 3):
        fleet, path = KillingFleet("/train/step", done=done), tmp_path / f"{others}.jsonl"
        with pytest.raises(Killed):
            await run_job(fleet, path, "--steps", "3")
        await run_job(fleet, tmp_path / f"beside-{others}.jsonl", "--steps", f"{others}")
        records = await run_job(fleet, path, "--steps", "3", "--resume")
        second = 5 if done else 5 + others
        assert [record.trainer["step"] for record in records] == [4, second, 6 + others]
        assert len(fleet.batches) == 3 + others, "one batch a step, and none twice"


async def test_a_job_and_its_trainer_may_be_killed_together(tmp_path: Path) -> None:
    fleet = KillingFleet("/train/publish", done=True)
    with pytest.raises(Killed):
        await run_job(fleet, tmp_path / "m.jsonl", "--steps", "3")
    fleet.restart()
    records = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "3", "--resume")
    assert [record.step for record in records] == [1, 2, 3] and len(fleet.batches) == 3
    assert [record.trainer["step"] for record in records] == [4, 5, 6]


async def test_a_killed_job_whose_batch_gave_way_to_others_goes_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ledger had no room for it any more: it would be refused at each --resume."""
    monkeypatch.setattr(fake_fleet, "LIMITS", fake_fleet.LIMITS.model_copy(update={"max_rollouts": 60}))
    fleet = KillingFleet("/train/step", done=False)
    with pytest.raises(Killed):
        await run_job(fleet, tmp_path / "m.jsonl", "--steps", "3")
    kept = sum(fleet.store.counts()[0].values())
    others = [request(f"other-{number}") for number in range(60 - kept + 12)]
    for each in others:
        fleet.store.open(each)
    for each in others:
        fleet.store.discard(each.rollout_ids[0], "")
    records = await run_job(fleet, tmp_path / "m.jsonl", "--steps", "3", "--resume")
    assert [record.step for record in records] == [1, 2, 3] and len(fleet.batches) == 3
    assert "step 2 is made of other groups" in capsys.readouterr().out


class OftenKilled(FakeFleet):
    """The job is killed at any of its calls, done or not, again and again."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.draw = draw
        self.calls = 0  # until the next kill

    async def answer(self, request: httpx.Request) -> httpx.Response:
        self.calls -= 1
        if self.calls != 0:
            return await super().answer(request)
        if self.draw.random() < 0.5:
            await super().answer(request)
        raise Killed


@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 100), marks=pytest.mark.long)], ids=["some", "many"]
)
@pytest.mark.timeout(600)
@pytest.mark.slow
async def test_a_job_that_is_killed_at_any_moment_learns_from_each_problem_once(
    seeds: range, tmp_path: Path
) -> None:
    for seed in seeds:
        fleet, path = OftenKilled(Random(seed)), tmp_path / f"{seed}.jsonl"
        lives = 0
        while len(fleet.labels) < 4 or len(metrics.records(path)) < 4:
            lives += 1
            fleet.calls = fleet.draw.randint(1, 40)
            resume = ["--resume"] if path.exists() else []
            with suppress(Killed):
                await run_job(fleet, path, "--steps", "4", *resume)
        assert lives > 1
        assert [record.step for record in metrics.records(path)] == [1, 2, 3, 4]
        assert fleet.labels == ["1", "2", "3", "4"] and len(fleet.batches) == 4
        assert_all_accounted_for(fleet, path, steps=4)


def assert_all_accounted_for(fleet: FakeFleet, path: Path, steps: int) -> None:
    """Each problem that was begun was consumed by one step, or waits."""
    rows = [json.loads(line) for line in path.with_suffix(".rollouts.jsonl").read_text().splitlines()]
    step_of = {(row["problem"], row["step"]) for row in rows}
    assert len(step_of) == len({problem for problem, _ in step_of}) == 2 * steps
    configuration = metrics.last_configuration(path)
    assert configuration is not None
    run, opened, ready = fleet.store.position(configuration.run_id)
    assert run.ends == {"consumed": 2 * steps} and run.next == len(opened) + ready + 2 * steps


async def test_a_job_plays_the_problems_that_were_killed_with_it_again(tmp_path: Path) -> None:
    fleet = KillingFleet("/rollouts/settle", done=False)
    with pytest.raises(Killed):
        await run_job(fleet, tmp_path / "m.jsonl", "--steps", "2")
    configuration = metrics.last_configuration(tmp_path / "m.jsonl")
    assert configuration is not None
    _, opened, _ = fleet.store.position(configuration.run_id)
    assert opened
    await run_job(fleet, tmp_path / "m.jsonl", "--steps", "4", "--resume")
    rows = [json.loads(line) for line in (tmp_path / "m.rollouts.jsonl").read_text().splitlines()]
    assert {int(group.rpartition(".")[2]) for group in opened} <= {row["problem"] for row in rows}
    assert fleet.ends() == {"consumed": 8}


async def test_a_killed_jobs_settle_may_arrive_while_the_next_job_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A router that waits for a new controller does not know that its client has gone."""

    class LateSettle(KillingFleet):
        def __init__(self, arrives: str) -> None:
            super().__init__("/rollouts/settle", done=False)
            self.arrives, self.late = arrives, b""

        async def answer(self, request: httpx.Request) -> httpx.Response:
            path = request.url.path
            if self.kills == path and len(self.labels) == 1:
                self.late = request.content
            elif self.kills is None and path == self.arrives and self.late:
                late, self.late = self.late, b""
                self.rollouts("/rollouts/settle", late)
            return await super().answer(request)

    for arrives in ("/v1/chat/completions", "/rollouts/settle"):
        fleet, path = LateSettle(arrives), tmp_path / f"{len(arrives)}.jsonl"
        with pytest.raises(Killed):
            await run_job(fleet, path, "--steps", "4")
        await run_job(fleet, path, "--steps", "4", "--resume")
        assert not fleet.late and len(fleet.batches) == 4
        assert "the job before has settled it" in capsys.readouterr().out
        assert_all_accounted_for(fleet, path, steps=4)


async def test_a_fleet_without_a_ledger_is_refused_with_the_settings_name(tmp_path: Path) -> None:
    class Without(FakeFleet):
        async def answer(self, request: httpx.Request) -> httpx.Response:
            if request.url.path.startswith("/rollouts/"):
                return refusal(400, "invalid_request", "expected the section 'rollouts' in its settings")
            return await super().answer(request)

    with pytest.raises(FleetError, match="expected the section 'rollouts' in its settings"):
        await run_job(Without(), tmp_path / "m.jsonl", "--steps", "1")


async def test_a_step_of_another_program_is_not_taken_for_the_jobs_own(tmp_path: Path) -> None:
    class Shared(FakeFleet):
        async def answer(self, request: httpx.Request) -> httpx.Response:
            answer = await super().answer(request)
            self.steps += request.url.path == "/rollouts/take"
            return answer

    fleet = Shared()
    await run_job(fleet, tmp_path / "m.jsonl", "--steps", "2")
    assert len(fleet.batches) == 2
