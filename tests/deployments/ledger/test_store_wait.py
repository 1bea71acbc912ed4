"""Who waits in vain for a version that its publisher was to write, as the status says it."""

from typing import Any

from tests.deployments.ledger.ledger_scene import Scene


def scene_of(replicas: int) -> Scene:
    return Scene(replicas=replicas, store_timeout_s=20)


def problem(scene: Scene) -> Any:
    return scene.status().store_problem


def test_joiners_that_wait_for_what_its_publisher_never_wrote_are_in_the_status() -> None:
    scene = scene_of(1)
    scene.publish()  # as the trainer does, which writes its versions itself
    joiner = scene.start(version=0)
    scene.wait(18)
    assert problem(scene) is None and not joiner.admitted
    scene.wait(4)
    why = "its publisher has not written it, and ['r1'] wait for it: publish again"
    assert problem(scene) == f"version 1 is not in the store: {why}"
    assert [each.name for each in scene.ledger.events_since(0)].count("not_stored") == 1
    scene.ledger.set_stored(1, "/store/v1", None, scene.now)
    scene.poll()
    assert joiner.admitted and problem(scene) is None


def test_a_version_that_nobody_waits_for_is_no_problem() -> None:
    scene = scene_of(2)
    scene.publish()
    scene.wait(60)
    assert problem(scene) is None


def test_the_next_round_ends_the_wait_for_the_store() -> None:
    scene = scene_of(1)
    scene.publish()
    joiner = scene.start(version=0)
    scene.wait(30)
    assert problem(scene) is not None
    scene.publish()
    assert joiner.admitted and joiner.version == 2 and problem(scene) is None


def test_the_status_says_at_once_that_the_trainer_could_not_write_its_version() -> None:
    scene = scene_of(1)
    scene.publish()
    scene.ledger.set_unstored(1, "OSError: No space left on device", scene.now)
    assert problem(scene) == "version 1 is not in the store: OSError: No space left on device"
    scene.ledger.set_unstored(0, "too late", scene.now)
    scene.publish()
    assert problem(scene) is None, "joiners take part in the next round"
    scene.ledger.set_unstored(2, "disk full", scene.now)
    scene.ledger.set_stored(2, "/store/v2", None, scene.now)
    assert problem(scene) is None
