"""The RL job with an environment of verifiers: turns and tools are rolled out, learned from and evaluated.

As in `test_verifiers` each turn of a model with random weights is forced to be a call; which one, it decides.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from app.jobs import metrics
from app.jobs.environments.verifiers_program import MARK
from app.jobs.metrics import StepRecord
from tests.clients.environments import HERE, python_of
from tests.clients.recorder import Call, recorded
from tests.clients.test_verifiers import CHAT, GENERATE, TALLY
from tests.documents import commands_of
from tests.fleet.deployed import Fleet
from trainers.trajectory import Trajectory
from trainers.trajectory_arrays import from_bytes

pytestmark = [
    pytest.mark.clients,
    pytest.mark.serve,
    pytest.mark.fleet("shared"),
    pytest.mark.long,
    pytest.mark.timeout(1800),
]

ROOT = HERE.parents[1]
(COMMAND,) = commands_of("docs/guides/environments.md", ".venv/bin/slipstream rl ")
GROUPS, ATTEMPTS, STEPS = 2, 3, 2
JOB_S = 900.0


def run_job(url: str, fleet: Fleet, directory: Path) -> tuple[str, list[StepRecord]]:
    """What the page's command printed, and its record; it runs where the page's environment is."""
    job = COMMAND.replace(".venv/bin/slipstream rl", f"{sys.executable} -m app.jobs")
    options = {
        "url": url,
        "steps": STEPS,
        "groups-per-step": GROUPS,
        "answers-per-group": ATTEMPTS,
        "groups-in-flight": GROUPS,
        "max-staleness": 0,
        "eval-every": STEPS,
        "eval-problems": 2,
        "eval-attempts": 2,
        "metrics": directory / "job.jsonl",
    }
    # Three rewards may be equal by chance, and then there is nothing to learn, and no new version.
    job += "".join(f" --{name} {value}" for name, value in options.items()) + " --dynamic-sampling"
    (directory / ".venv-verifiers").symlink_to(python_of("verifiers").parents[1])
    variables = {
        "COMMAND": f"tally @ {TALLY}/train.toml --client.renderer-model-name {fleet.checkpoint}",
        "TALLY": str(TALLY),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "HOME": str(directory),
    }
    done = subprocess.run(
        ["bash", "-euc", job],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=JOB_S,
        env=os.environ | variables,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    return printed, metrics.records(directory / "job.jsonl")


def by_session(calls: Sequence[Call]) -> list[list[Call]]:
    """The calls of each rollout, in order."""
    sessions: dict[str, list[Call]] = {}
    for call in calls:
        sessions.setdefault(call.headers["x-session-id"], []).append(call)
    return list(sessions.values())


def sampled(call: Call) -> dict[str, Any]:
    (choice,) = call.answer_json["choices"]
    return dict(choice)


def all_tokens(calls: Sequence[Call]) -> list[int]:
    """Of a conversation, from its prompt to its last answer."""
    return [*calls[-1].json["token_ids"], *sampled(calls[-1])["token_ids"]]


def difference(trajectory: Trajectory, calls: Sequence[Call]) -> float:
    """Of the log-probabilities, at most; infinite where tokens differ.

    The model is forced to say one of three things in each turn: several conversations have the same tokens,
    and those of different versions other log-probabilities.
    """
    if all_tokens(calls) != [*trajectory.prompt_token_ids, *trajectory.token_ids]:
        return inf
    values = [entry["logprob"] for call in calls for entry in sampled(call)["logprobs"]["content"]]
    mask = trajectory.loss_mask or [True] * len(trajectory.logprobs)
    said = [value for value, mine in zip(trajectory.logprobs, mask, strict=True) if mine]
    return max((abs(a - b) for a, b in zip(said, values, strict=True)), default=inf)


def check_batch(batch: Sequence[Trajectory], played: Sequence[list[Call]], template: Any) -> None:
    """Each trajectory is one conversation of those that were played, as the engine sampled it."""
    for trajectory in batch:
        calls = min(played, key=partial(difference, trajectory))
        assert all_tokens(calls) == [*trajectory.prompt_token_ids, *trajectory.token_ids]
        assert list(trajectory.prompt_token_ids) == calls[0].json["token_ids"]
        choices = [sampled(call) for call in calls]
        assert len(choices) >= 2 and trajectory.loss_mask is not None
        said = [place for place, mine in enumerate(trajectory.loss_mask) if mine]
        assert [trajectory.token_ids[place] for place in said] == [t for c in choices for t in c["token_ids"]]
        assert difference(trajectory, calls) < 1e-6
        dated = [place for span in trajectory.weight_versions for place in range(span.start, span.end)]
        assert trajectory.constrained == trajectory.loss_mask
        assert dated == said, "each sampled token has a version, and no other"
        versions = {span.version for span in trajectory.weight_versions}
        assert versions == {call.answer_json["weight_version"] for call in calls}
        told = [
            token for token, mine in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if not mine
        ]
        assert "total: " in template.decode(told), "a tool's answer is there and not learned from"


def test_the_job_learns_from_rollouts_with_tools_and_evaluates(fleet: Fleet, tmp_path: Path) -> None:
    was = fleet.version()
    with recorded(fleet.url) as record:
        printed, steps = run_job(record.url, fleet, tmp_path)
    assert "Traceback" not in printed, printed
    assert [step.version for step in steps] == [was + 1, was + 2] and fleet.version() == was + 2
    assert all(0 < step.reward <= 1 and step.staleness_max == 0 for step in steps)
    played = by_session(record.of(GENERATE))
    batches = [from_bytes(call.body) for call in record.of("/train/step")]
    template = AutoTokenizer.from_pretrained(fleet.checkpoint)
    assert len(batches) == STEPS and all(len(batch) >= ATTEMPTS for batch in batches)
    for batch in batches:
        check_batch(batch, played, template)
    for calls in [*played, *by_session(record.of(CHAT))]:
        assert len({call.answer_headers["x-slipstream-replica"] for call in calls}) == 1
    for step in steps:  # a regular expression constrains every turn
        assert step.trainer["constrained_fraction"] == step.trainer["importance_mean"] == 1.0
        assert "logprob_difference_max" not in step.trainer
    check_evaluation(steps[-1], record.of(CHAT))
    assert not left_running()


def check_evaluation(last: StepRecord, calls: Sequence[Call]) -> None:
    """All of it at the version that was published last."""
    made = last.evaluation
    assert made is not None and (made.version, made.problems) == (last.version, 2)
    assert set(made.pass_at) == {1, 2} and 0 < made.reward <= 1
    assert calls and {call.answer_json["weight_version"] for call in calls} == {last.version}
    assert len(by_session(calls)) == 4 and all("seed" not in call.json for call in calls)


def left_running() -> list[str]:
    """Processes of any rollout program."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and f"{MARK}=".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue  # it has ended
    return found
