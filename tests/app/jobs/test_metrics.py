import errno
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from app.jobs import metrics
from app.jobs.evaluation import Evaluation


def record(step: int) -> metrics.StepRecord:
    return metrics.StepRecord(
        step=step,
        reward=0.5,
        version=7,
        staleness_mean=1.0,
        staleness_max=2,
        groups=2,
        groups_with_signal=1,
        groups_dropped=0,
        answer_tokens_mean=3.0,
        tokens_per_s=100.0,
        step_s=1.5,
        wait_s=0.5,
        publish_s=0.25,
        elapsed_s=9.0,
        next_problem=4,
        seed=0,
        trainer={"loss": 0.125},
        example="6 + 2 = 8",
    )


def test_a_truncated_last_line_is_left_out_and_any_other_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    metrics.append(path, record(1))
    line = path.read_text()
    path.write_text(line + line[:40])
    assert metrics.records(path) == [record(1)]
    path.write_text(line[:40] + "\n" + line)
    with pytest.raises(ValueError, match=r"m\.jsonl:1: expected the record of a step"):
        metrics.records(path)
    with pytest.raises(ValueError, match="cannot be read"):
        metrics.records(tmp_path / "nothing")


@pytest.mark.parametrize("kept", [1, 40, -1])
def test_a_truncated_last_line_does_not_spoil_the_next_one(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    metrics.append(path, record(1))
    first = path.read_text()
    metrics.append(path, record(2))
    path.write_text(path.read_text()[: len(first) + kept] if kept > 0 else path.read_text()[:kept])
    metrics.append(path, record(3))
    metrics.append(path, record(4))
    assert metrics.records(path) == [record(1), record(3), record(4)]


@pytest.mark.parametrize("length", [10, 3 * metrics.BLOCK])
def test_a_truncated_rollout_does_not_spoil_the_next_one(length: int, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    first, second = {"text": "a"}, {"text": "b" * length}
    metrics.append_rollouts(path, [first])
    metrics.append_rollouts(path, [second])
    file = path.with_suffix(".rollouts.jsonl")
    file.write_bytes(file.read_bytes()[:-5])
    metrics.append_rollouts(path, [second])
    assert [json.loads(line) for line in file.read_text().splitlines()] == [first, second]


def test_a_record_is_a_line_for_a_person() -> None:
    made = replace(
        record(3), reward_std=0.25, cut_fraction=0.1, groups_dropped=4, groups_filtered=5, unanswered=6
    )
    assert made.left_out_fraction == 16 / 17
    line = made.line(20, left_s=150)
    assert line.startswith(
        "step   3 of 20  reward 0.500 ± 0.25  version 7  3 tokens (10% cut)  staleness 1.0  "
    )
    assert "1.5 s, 2 min left  left out: 6 with equal rewards, 4 too stale, 6 unanswered  '6 + 2 = 8'" in line
    assert "loss none" in replace(record(1), trainer={"loss": None, "skipped": True}).line(2, None)


@pytest.mark.parametrize(("share", "spoken_of"), [(None, False), (0.5, False), (0.017, True), (0, True)])
def test_a_small_effective_sample_is_warned_of(share: float | None, spoken_of: bool) -> None:
    trainer = {} if share is None else {"effective_sample_fraction": share}
    caution = replace(record(3), trainer=trainer).caution()
    assert (caution is not None) is spoken_of
    if share == 0.017:
        assert str(caution).startswith(
            "step 3: its importance weights leave 1.7% of its tokens to learn from"
        )


CONFIGURATION = metrics.Configuration(options={"steps": 3}, model="tiny", version=4, began=1e9)


def test_a_record_begins_with_the_whole_configuration(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    metrics.append(path, CONFIGURATION)
    metrics.append(path, record(1))
    metrics.append(path, CONFIGURATION)  # --resume
    metrics.append(path, record(2))
    assert metrics.records(path) == [record(1), record(2)]
    assert json.loads(path.read_text().split("\n")[0]) == asdict(CONFIGURATION)


def test_two_runs_do_not_share_a_record(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "m.jsonl"
    with pytest.raises(ValueError, match="cannot be read: there is none"), metrics.claimed(path, resume=True):
        pass
    with metrics.claimed(path, resume=False):
        metrics.append(path, record(1))
        with (
            pytest.raises(ValueError, match="another job writes the record"),
            metrics.claimed(path, resume=True),
        ):
            pass
    with (
        pytest.raises(ValueError, match="has the record of a run: --resume"),
        metrics.claimed(path, resume=False),
    ):
        pass
    with metrics.claimed(path, resume=True):
        metrics.append(path, record(2))
    assert metrics.records(path) == [record(1), record(2)]


def test_a_file_system_without_locks_does_for_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuses)
    with metrics.claimed(tmp_path / "m.jsonl", resume=False):
        pass


def test_the_newest_run_is_resumed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name the file with --metrics"):
        metrics.newest_metrics_file(tmp_path)
    for name in ("1-000000.jsonl", "2-000000.jsonl", "2-000000.rollouts.jsonl"):
        name = f"grpo-2026010{name}"
        (tmp_path / name).touch()
    assert metrics.newest_metrics_file(tmp_path).name == "grpo-20260102-000000.jsonl"


def test_a_user_without_a_home_is_told_to_name_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as without HOME and in no /etc/passwd
    for file in (metrics.new_metrics_file, metrics.newest_metrics_file):
        with pytest.raises(ValueError, match="expected a home directory: set HOME, or --metrics"):
            file()


def test_a_tracker_gets_every_number_of_a_step() -> None:
    evaluation = Evaluation(
        version=7, problems=2, reward=0.5, pass_at={1: 0.25}, reward_by_source={"sums": 0.75}
    )
    values = replace(record(1), evaluation=evaluation, reward_by_source={"sums": 0.25}).values()
    assert values["reward/sums"] == 0.25 and values["evaluation/reward/sums"] == 0.75
    assert values["left_out_fraction"] == 0.5 and values["evaluation/cut_fraction"] == 0.0
    assert values["reward"] == 0.5 and values["trainer/loss"] == 0.125
    assert values["evaluation/pass@1"] == 0.25 and "seed" not in values and "example" not in values
