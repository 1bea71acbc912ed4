"""The proof of policy: who is compared with whom, and what follows."""

import math
from typing import Any

import pytest

from deployments.ledger.proof import deviations
from deployments.protocol.ledger_config import ProofConfig
from deployments.protocol.poll import Scores
from deployments.protocol.publishing import Deviation, RoundReport
from tests.deployments.ledger.ledger_scene import Scene, report_of

SAME = (-3.0, -5.0, -9.0)
OTHER = (-3.0, -5.5, -9.25)
APART = Deviation(mean=0.25, worst=0.5)
NONE = Deviation(mean=0.0, worst=0.0)


def proven(
    *scores: tuple[float, ...] | None, trainer: tuple[float, ...] | None = None, **proof: Any
) -> Scene:
    """Version 1 is committed, and the replicas and the trainer have scored it."""
    scene = Scene(replicas=len(scores), proof=ProofConfig(sequences=3, **proof))
    version = report_of(scene.publish()).version
    for replica, values in zip(scene.replicas, scores, strict=True):
        replica.scores = None if values is None else Scores(version=version, values=values)
    if trainer is not None:
        scene.ledger.set_scores(Scores(version=version, values=trainer), scene.now)
    scene.poll()
    return scene


def last(scene: Scene) -> RoundReport:
    return scene.ledger.history()[-1]


def warned(scene: Scene) -> list[Any]:
    return [each.fields["replica"] for each in scene.ledger.events_since(0) if each.name == "proof"]


def states(scene: Scene) -> list[str]:
    return [scene.state_of(replica) for replica in scene.replicas]


def test_equal_replicas_have_no_difference() -> None:
    scene = proven(SAME, SAME, bound=0.01)
    assert last(scene).proof == {"r0": NONE, "r1": NONE}
    assert last(scene).proof_reference == "replicas"
    assert warned(scene) == []


@pytest.mark.parametrize(("action", "third"), [("warn", "serving"), ("fence", "fenced")])
def test_one_of_three_that_differs_is_found(action: str, third: str) -> None:
    scene = proven(SAME, SAME, OTHER, bound=0.1, action=action)
    assert last(scene).proof == {"r0": NONE, "r1": NONE, "r2": APART}
    assert states(scene) == ["serving", "serving", third]
    scene.poll()
    assert warned(scene) == (["r2"] if action == "warn" else []), "one line, however often it is reported"


@pytest.mark.parametrize(("action", "third"), [("warn", "serving"), ("fence", "fenced")])
def test_a_replica_with_another_version_of_an_adapter_is_found(action: str, third: str) -> None:
    scene = proven(SAME, SAME, SAME, trainer=SAME, bound=0.1, action=action)
    for replica, values in zip(scene.replicas, (SAME, SAME, OTHER), strict=True):
        of_one = {} if values is OTHER else {"new@1": SAME}  # only two have it yet
        replica.scores = Scores(version=1, values=SAME, adapters={"math@5": values} | of_one)
    scene.poll()
    scene.poll()
    assert states(scene) == ["serving", "serving", third]
    said = [each.fields["said"] for each in scene.ledger.events_since(0) if each.name == "proof"]
    expected = ["0.5 from the replicas' with adapter math@5, and the bound is 0.1"]
    assert said == (expected if action == "warn" else [])


def test_without_a_bound_nothing_follows() -> None:
    scene = proven(SAME, SAME, OTHER, action="fence")
    assert last(scene).proof["r2"] == APART
    assert states(scene) == ["serving"] * 3
    assert warned(scene) == []


def test_of_two_that_differ_none_is_fenced() -> None:
    scene = proven(SAME, OTHER, bound=0.1, action="fence")
    assert last(scene).proof == {"r0": APART, "r1": APART}
    assert states(scene) == ["serving"] * 2
    assert sorted(warned(scene)) == ["r0", "r1"]


def test_the_trainer_decides_between_two() -> None:
    scene = proven(SAME, OTHER, trainer=SAME, bound=0.1, action="fence")
    assert last(scene).proof == {"r0": NONE, "r1": APART}
    assert last(scene).proof_reference == "trainer"
    assert states(scene) == ["serving", "fenced"]


def test_the_trainer_decides_between_two_also_if_it_answers_last() -> None:
    scene = proven(SAME, OTHER, bound=0.1, action="fence")
    assert states(scene) == ["serving"] * 2
    scene.ledger.set_scores(Scores(version=1, values=SAME), scene.now)
    assert states(scene) == ["serving", "fenced"]


def test_one_that_differs_again_is_fenced_again() -> None:
    """The scores of replicas that are gone have no voice."""
    scene = proven(SAME, OTHER, trainer=SAME, bound=0.1, action="fence")
    scene.start(version=1, scores=Scores(version=1, values=OTHER))
    scene.poll()
    assert states(scene)[1:] == ["fenced", "fenced"]


def test_a_fleet_that_differs_from_its_trainer_goes_on() -> None:
    scene = proven(OTHER, OTHER, trainer=SAME, bound=0.1, action="fence")
    assert last(scene).proof == {"r0": APART, "r1": APART}
    assert states(scene) == ["serving"] * 2
    assert sorted(warned(scene)) == ["r0", "r1"]


def test_a_replica_that_does_not_answer_is_left_out_and_delays_nothing() -> None:
    scene = proven(SAME, None, OTHER, trainer=SAME, bound=0.1, action="fence")
    assert last(scene).proof == {}
    scene.wait(scene.config.proof_timeout_s + 2)
    assert last(scene).proof == {"r0": NONE, "r2": APART}
    assert states(scene) == ["serving", "serving", "fenced"]
    assert report_of(scene.publish()).version == 2


def test_scores_of_a_version_that_was_replaced_are_dropped() -> None:
    scene = proven(SAME, None)
    report_of(scene.publish())
    for name, version in ((0, 2), (1, 1), (1, 2)):
        scene.replicas[name].scores = Scores(version=version, values=SAME)
        scene.poll()
        scene.replicas[name].scores = None
    assert [report.proof for report in scene.ledger.history()] == [{}, {"r0": NONE, "r1": NONE}]


def test_what_is_not_comparable_is_left_out() -> None:
    assert deviations({"r0": SAME}, None) == {}
    assert deviations({"r0": SAME, "r1": SAME[:2]}, SAME) == {"r0": NONE}


def test_a_score_that_is_no_number_is_far_from_any() -> None:
    scores = Scores(version=1, values=(math.nan, -math.inf, -1.0))
    assert deviations({"r0": scores.values}, (-1.0, -1.0, -1.0))["r0"].worst > 1000
