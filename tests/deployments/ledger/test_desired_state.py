import pytest

from deployments.protocol.engine_state import (
    EngineState,
    InFlight,
    Pause,
    apply,
    asleep,
    discarded,
    equivalent,
    intact,
    is_paused,
    path_to,
)
from deployments.protocol.errors import Conflict, ReplicaUnavailable
from deployments.protocol.poll import Outcome, RunOperation
from tests.deployments.ledger.compacted import compact
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.ledger.ledger_scene import Scene, condition, operations


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
    ],
)
def test_what_operations_leave_behind(done: list[str], left: list[str]) -> None:
    state: EngineState = ()
    for each in condition(done):
        state = apply(state, each)
    assert state == condition(left)


@pytest.mark.parametrize(
    ("current", "wanted", "steps"),
    [
        ([], [], []),
        ([], ["pause keep", "sleep 1"], ["pause keep", "sleep 1"]),
        (["sleep 1"], ["sleep 1", "wake_up weights"], ["wake_up weights"]),
        (["pause keep"], [], ["resume"]),
        (["sleep 1"], [], ["wake_up"]),
        (["pause keep", "sleep 1"], ["pause abort"], ["wake_up", "resume", "pause abort"]),
    ],
)
def test_the_path_from_one_condition_to_another(
    current: list[str], wanted: list[str], steps: list[str]
) -> None:
    found = path_to(condition(wanted), condition(current))
    assert [each.name for each in found] == [each.name for each in condition(steps)]
    state = condition(current)
    for each in found:
        state = apply(state, each)
    assert state == condition(wanted)


def test_the_parts_that_sleep() -> None:
    assert asleep(condition(["sleep 1", "wake_up weights"])) == {"kv_cache"}
    assert asleep(condition(["pause keep"])) == frozenset()


def test_weights_are_discarded_from_a_sleep_at_level_2_until_a_round_replaces_them() -> None:
    asleep_at_2 = condition(["pause keep", "sleep 2", "wake_up weights"])
    assert discarded(asleep_at_2)
    assert intact(asleep_at_2) == condition(["pause keep", "sleep 1", "wake_up weights"])
    for texts in (["sleep 1", "wake_up weights"], ["sleep 0"], ["pause keep"], []):
        assert not discarded(condition(texts)) and intact(condition(texts)) == condition(texts)


@pytest.mark.parametrize("text", ["pause keep", "pause wait"])
def test_a_joiner_is_paused_before_it_takes_requests(text: str) -> None:
    scene = Scene(replicas=1)
    scene.call(text)
    joiner = scene.start()
    assert not joiner.admitted
    assert operations(joiner) == ["pause"]
    assert joiner.ran[-1].body == RunOperation(operation=Pause(mode=InFlight.KEEP, clear_cache=True))
    scene.poll()
    assert joiner.admitted
    scene.call("resume")
    late = scene.start()
    scene.poll()
    assert late.admitted and operations(late) == []
    assert scene.status().condition == ()


def test_nobody_is_admitted_while_the_condition_changes() -> None:
    scene = Scene(replicas=1)
    slow = scene.replicas[0]
    slow.hangs_in.add(RunOperation)
    task = scene.ask("pause keep")
    joiner = scene.start()
    scene.poll()
    assert not task.done and not joiner.admitted
    slow.hangs_in.clear()
    scene.poll(6)
    assert task.done and joiner.admitted and operations(joiner) == ["pause"]


def test_a_joiner_changes_course_when_the_condition_changes() -> None:
    scene = Scene(replicas=1)
    scene.call("pause keep")
    joiner = FakeReplica(replica_id="r1", incarnation="r1-1")
    scene.replicas.append(joiner)
    joiner.hangs_in.add(RunOperation)
    scene.poll(1)
    scene.call("resume")
    joiner.hangs_in.clear()
    scene.poll(6)
    assert operations(joiner) == ["pause", "resume"] and joiner.admitted


@pytest.mark.parametrize(
    "text",
    ["is_paused", "is_sleeping", "reset_prefix_cache", "abort_requests", "weight_checker", "disconnect"],
)
def test_a_replica_that_cannot_answer_a_question_or_disconnect_is_named_and_not_fenced(text: str) -> None:
    scene = Scene(replicas=2)
    scene.replicas[0].outcomes[RunOperation] = Outcome.REPLICA_FAILED
    call = scene.call(text)
    assert isinstance(call.error, ReplicaUnavailable) and list(call.error.detail["replicas"]) == ["r0"]
    scene.poll(3)
    assert [replica.admitted for replica in scene.replicas] == [True, True]


def test_a_joiner_that_cannot_follow_is_fenced() -> None:
    scene = Scene(replicas=1)
    scene.call("sleep 1")
    joiner = FakeReplica(replica_id="r1", incarnation="r1-1")
    joiner.outcomes[RunOperation] = Outcome.REPLICA_FAILED
    scene.replicas.append(joiner)
    scene.poll(6)
    assert joiner.fenced == "condition: sleep: replica_failed here"


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


@pytest.mark.parametrize(
    ("before", "asked", "left"),
    [
        ([], "pause keep", ["pause keep"]),
        (["pause keep"], "resume", []),
        ([], "sleep 1", ["sleep 1"]),
        (["pause keep", "sleep 1"], "wake_up weights", ["pause keep", "sleep 1", "wake_up weights"]),
        (["sleep 1"], "wake_up", []),
        (["pause abort"], "sleep 2", ["pause abort", "sleep 2"]),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_what_half_of_the_fleet_did_before_a_restart_all_of_it_does(
    before: list[str], asked: str, left: list[str], late: bool
) -> None:
    """`late`: the other half holds a directive of the earlier controller, which it goes through first."""
    scene = Scene(replicas=2)
    for each in before:
        assert scene.call(each).error is None
    scene.ask(asked)
    first, second = scene.replicas
    scene.poll(only=[first])
    directive = scene.ledger.poll(second.report(), scene.now) if late else None
    scene.restart()
    scene.poll(1)
    if directive is not None:
        second.take(directive)
    scene.wait(5)
    for replica in scene.replicas:
        assert equivalent(replica.condition, condition(left)), replica.replica_id
        assert replica.fenced is None and scene.state_of(replica) == "serving"
    assert operations(first) == [each.partition(" ")[0] for each in [*before, asked]], "it was there already"


def test_a_joiner_that_an_earlier_controller_paused_is_not_admitted_paused() -> None:
    scene = Scene(replicas=1)
    scene.call("pause keep")
    joiner = scene.start()
    assert is_paused(joiner.condition) and not joiner.admitted
    scene.ask("resume")
    scene.poll(only=[scene.replicas[0]])
    scene.restart()
    scene.wait(5)
    assert joiner.admitted and not is_paused(joiner.condition)


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
    assert scene.open() == 1
