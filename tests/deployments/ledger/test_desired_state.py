"""What pauses and sleeps leave behind, and how a replica that starts later comes to the same."""

import pytest

from deployments.errors import Conflict
from deployments.ledger.decisions import Step, compact
from deployments.ledger.desired_state import after, asleep, void, way, whole
from deployments.protocol import InstructionKind, Outcome
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.ledger.ledger_scene import Scene, condition, operations, step


@pytest.mark.parametrize(
    ("done", "left"),
    [
        ([], []),
        (["pause keep"], ["pause keep"]),
        (["pause keep", "pause abort"], ["pause abort"]),
        (["pause keep", "resume"], []),
        (["resume"], []),
        (["sleep 1"], ["sleep 1"]),
        (["sleep 1", "sleep 2"], ["sleep 2"]),
        (["sleep 1", "wake_up"], []),
        (["sleep 1", "wake_up weights"], ["sleep 1", "wake_up weights"]),
        (["sleep 1", "wake_up weights", "wake_up kv_cache"], []),
        (["sleep 1", "wake_up weights,kv_cache"], []),
        (["sleep 1", "wake_up weights", "sleep 2"], ["sleep 2"]),
        (["sleep 2", "sleep 1"], ["sleep 2"]),  # what is lost stays lost, wherever it sleeps
        (["sleep 2", "wake_up weights", "sleep 1"], ["sleep 2"]),
        (["sleep 2", "wake_up weights", "sleep 0"], ["sleep 2", "wake_up weights"]),
        (["sleep 2", "pause keep", "resume"], ["sleep 2"]),
        (["sleep 0", "wake_up scheduling"], []),
        (["sleep 1", "wake_up scheduling"], ["sleep 1", "wake_up scheduling"]),
        (["pause keep", "sleep 1"], ["pause keep", "sleep 1"]),
        (["pause keep", "sleep 1", "resume"], ["sleep 1"]),
        (["pause keep", "sleep 1", "wake_up"], []),
        (["pause keep", "wake_up"], []),
        (["pause keep", "reset_prefix_cache"], ["pause keep"]),
    ],
)
def test_what_operations_leave_behind(done: list[str], left: list[str]) -> None:
    state: tuple[Step, ...] = ()
    for each in condition(done):
        state = after(state, each)
    assert state == condition(left)


@pytest.mark.parametrize(
    ("have", "wanted", "steps"),
    [
        ([], [], []),
        ([], ["pause keep", "sleep 1"], ["pause keep", "sleep 1"]),
        (["sleep 1"], ["sleep 1", "wake_up weights"], ["wake_up weights"]),
        (["pause keep"], [], ["resume"]),
        (["sleep 1"], [], ["wake_up"]),
        (["pause keep", "sleep 1"], ["pause abort"], ["wake_up", "resume", "pause abort"]),
    ],
)
def test_the_way_from_one_condition_to_another(have: list[str], wanted: list[str], steps: list[str]) -> None:
    found = way(condition(have), condition(wanted))
    assert [each.operation for each in found] == [each.operation for each in condition(steps)]
    state = condition(have)
    for each in found:
        state = after(state, each)
    assert state == condition(wanted)


def test_the_parts_that_sleep() -> None:
    assert asleep(condition(["sleep 1", "wake_up weights"])) == {"kv_cache"}
    assert asleep(condition(["pause keep"])) == frozenset()


def test_weights_are_void_from_a_sleep_at_level_2_until_they_come() -> None:
    asleep_at_2 = condition(["pause keep", "sleep 2", "wake_up weights"])
    assert void(asleep_at_2)
    assert whole(asleep_at_2) == condition(["pause keep", "sleep 1", "wake_up weights"])
    for texts in (["sleep 1", "wake_up weights"], ["sleep 0"], ["pause keep"], []):
        assert not void(condition(texts)) and whole(condition(texts)) == condition(texts)


def test_a_joiner_is_paused_before_it_takes_requests() -> None:
    scene = Scene(replicas=1)
    scene.call("pause keep")
    joiner = scene.start()
    assert not joiner.admitted
    assert operations(joiner) == ["pause"]
    assert joiner.ran[-1].args["arguments"] == {"mode": "keep", "clear_cache": True}
    scene.poll()
    assert joiner.admitted
    scene.call("resume")
    late = scene.start()
    scene.poll()
    assert late.admitted and operations(late) == []
    assert scene.ledger.status(scene.now)["condition"] == []


def test_a_joiner_catches_up_before_it_sleeps() -> None:
    scene = Scene(replicas=1)
    scene.publish()
    scene.ledger.set_stored(1, "/store/v1", None, scene.now)
    scene.call("sleep 1")
    scene.call("wake_up weights")
    joiner = scene.start(version=0)
    scene.poll()
    assert joiner.kinds() == ["connect", "catch_up", "call", "call"]
    assert operations(joiner) == ["sleep", "wake_up"] and joiner.admitted


def test_nobody_is_admitted_while_the_condition_changes() -> None:
    scene = Scene(replicas=1)
    slow = scene.replicas[0]
    slow.mute.add(InstructionKind.CALL)
    pause = step("pause keep")
    task = scene.ledger.call(pause.operation, pause.arguments, scene.now)
    joiner = scene.start()
    scene.poll()
    assert not task.done and not joiner.admitted
    slow.mute.clear()
    scene.poll(6)
    assert task.done and joiner.admitted and operations(joiner) == ["pause"]


def test_a_joiner_on_its_way_turns_when_the_condition_changes() -> None:
    scene = Scene(replicas=1)
    scene.call("pause keep")
    joiner = FakeReplica(replica_id="r1", incarnation="r1-1")
    scene.replicas.append(joiner)
    joiner.mute.add(InstructionKind.CALL)
    scene.poll(1)
    scene.call("resume")
    joiner.mute.clear()
    scene.poll(6)
    assert operations(joiner) == ["pause", "resume"] and joiner.admitted


def test_a_joiner_that_cannot_follow_is_fenced() -> None:
    scene = Scene(replicas=1)
    scene.call("sleep 1")
    joiner = FakeReplica(replica_id="r1", incarnation="r1-1")
    joiner.outcomes[InstructionKind.CALL] = Outcome.FAILED
    scene.replicas.append(joiner)
    scene.poll(6)
    assert joiner.fenced == "join: sleep: failed here"


@pytest.mark.parametrize("compacted", [False, True])
def test_the_condition_outlives_the_controller(compacted: bool) -> None:
    scene = Scene(replicas=1)
    scene.call("pause keep")
    scene.call("sleep 2")
    if compacted:
        scene.journal = compact(scene.journal)
    scene.restart()
    joiner = scene.start()
    scene.poll(6)
    assert operations(scene.replicas[0]) == ["pause", "sleep"], "it was in it before"
    assert operations(joiner) == ["pause", "sleep"] and joiner.admitted


def test_what_nobody_did_is_not_asked_of_joiners() -> None:
    scene = Scene(replicas=1)
    scene.replicas[0].outcomes[InstructionKind.CALL] = Outcome.REJECTED
    assert scene.call("sleep 9").error is not None
    joiner = scene.start()
    scene.poll()
    assert operations(joiner) == [] and joiner.admitted


def test_a_fleet_without_replicas_can_be_paused_before_they_come() -> None:
    scene = Scene()
    assert scene.call("pause keep").error is None
    joiner = scene.start()
    scene.poll()
    assert operations(joiner) == ["pause"] and joiner.admitted


def test_no_round_opens_while_the_weights_sleep() -> None:
    scene = Scene(replicas=1)
    scene.connect()
    scene.call("sleep 1")
    with pytest.raises(Conflict, match="the fleet's weights sleep"):
        scene.open()
    scene.call("wake_up weights")
    scene.open()
