"""Versions that replicas write to the store; which of them does, the store's lock decides."""

from typing import Any

import pytest

from deployments.protocol.poll import StoreResult
from deployments.protocol.publishing import RoundReport
from tests.deployments.ledger.ledger_scene import Scene, report_of

DISK_FULL = "OSError: No space left on device"


def scene_of(replicas: int, **fields: Any) -> Scene:
    scene = Scene(replicas=replicas)
    for replica in scene.replicas:
        for name, value in fields.items():
            setattr(replica, name, value)
    return scene


def publish(scene: Scene, **options: Any) -> RoundReport:
    report = report_of(scene.publish(persist=True, **options))
    assert report.phase == "committed"
    return report


def end_write(scene: Scene, version: int, problem: str = "") -> None:
    """The first replica's write ends."""
    path = "" if problem else f"/store/v{version}"
    result = StoreResult(version=version, label=None, path=path, problem=problem)
    scene.replicas[0].store_result = result
    scene.poll()


def stored(scene: Scene) -> Any:
    return scene.status().stored_version


def problem(scene: Scene) -> Any:
    return scene.status().store_problem


def test_a_version_that_is_found_counts_if_it_is_the_committed_one() -> None:
    scene = scene_of(2, store_problem=DISK_FULL)
    publish(scene)
    digest = scene.ledger.state.digest_of(1)
    assert digest is not None and stored(scene) is None
    for version, found in ((2, digest), (1, "of other weights"), (1, None)):
        scene.ledger.find_stored(version, f"/store/v{version}", None, found)
        assert stored(scene) is None
    events = len(scene.ledger.events_since(0))
    for _ in range(2):
        scene.ledger.find_stored(1, "/store/v1", None, digest)
        scene.ledger.set_stored(1, "/store/v1", None, scene.now)  # as its writer reports it
    assert stored(scene) == 1 and len(scene.ledger.events_since(0)) == events + 1


@pytest.mark.parametrize("outside_versions", [True, False])
def test_nothing_is_retained_of_what_no_replica_writes(outside_versions: bool) -> None:
    scene = Scene(replicas=2, outside_versions=outside_versions)
    report_of(scene.publish(persist=not outside_versions))
    assert stored(scene) is None and problem(scene) is None
    assert all(each.retained_version is None for each in scene.replicas)


def test_a_write_does_not_hold_the_next_round_up() -> None:
    scene = scene_of(2, writes_at_once=False)
    publish(scene)
    publish(scene)
    assert scene.ledger.state.committed_version == 2 and stored(scene) is None
    for version in (1, 2):
        end_write(scene, version)
        assert stored(scene) == version
    end_write(scene, 1)
    assert stored(scene) == 2, "it was late"


def test_a_version_that_no_replica_retains_is_a_problem() -> None:
    scene = scene_of(1, retains=False)
    publish(scene)
    assert problem(scene) == "version 1 is not in the store: no replica retains its tensors"


def test_a_failed_write_is_a_problem_until_another_attempt_succeeds() -> None:
    scene = scene_of(2, writes_at_once=False)
    publish(scene)
    joiner = scene.start(version=0)
    assert problem(scene) is None, "it is being written"
    for _ in range(3):
        end_write(scene, 1, DISK_FULL)
    assert problem(scene) == f"version 1 is not in the store: r0: {DISK_FULL}"
    assert [each.name for each in scene.ledger.events_since(0)].count("not_stored") == 1, "said once"
    assert not joiner.admitted and scene.replicas[0].fenced is None, "a full disk says nothing of its weights"
    end_write(scene, 1)
    scene.wait(3)
    assert stored(scene) == 1 and problem(scene) is None and joiner.admitted


def test_the_status_says_at_once_that_the_trainer_could_not_write_its_version() -> None:
    scene = scene_of(1)
    scene.publish()  # as the trainer does, which writes its versions itself
    assert problem(scene) is None
    scene.ledger.set_unstored(1, DISK_FULL, scene.now)
    assert problem(scene) == f"version 1 is not in the store: {DISK_FULL}"
    scene.ledger.set_unstored(0, "too late", scene.now)
    scene.publish()
    assert problem(scene) is None, "joiners take part in the next round"
    scene.ledger.set_unstored(2, "disk full", scene.now)
    scene.ledger.set_stored(2, "/store/v2", None, scene.now)
    assert problem(scene) is None


def test_a_restarted_controller_learns_from_reports_what_is_stored() -> None:
    scene = scene_of(2, writes_at_once=False)
    publish(scene)
    scene.restart()
    assert problem(scene) is None, "one that has not polled yet may retain it"
    scene.poll()
    assert problem(scene) is None and stored(scene) is None
    end_write(scene, 1)
    scene.restart()
    scene.poll()
    assert stored(scene) == 1
