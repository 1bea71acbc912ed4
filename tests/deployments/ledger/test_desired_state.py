from typing import Any

import pytest

from deployments.protocol import engine_state
from deployments.protocol.errors import Conflict, ReplicaUnavailable
from deployments.protocol.poll import Commit, CommitMode, Outcome, RunOperation, Verify
from tests.deployments.ledger.compacted import compact
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.ledger.ledger_scene import Scene, condition, operation, operations, report_of


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
    state: engine_state.EngineState = ()
    for each in condition(done):
        state = engine_state.apply(state, each)
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
    found = engine_state.path_to(condition(wanted), condition(current))
    assert [each.name for each in found] == [each.name for each in condition(steps)]
    state = condition(current)
    for each in found:
        state = engine_state.apply(state, each)
    assert state == condition(wanted)


def test_weights_are_discarded_from_a_sleep_at_level_2_until_a_round_replaces_them() -> None:
    asleep_at_2 = condition(["pause keep", "sleep 2", "wake_up weights"])
    assert engine_state.discarded(asleep_at_2)
    assert engine_state.intact(asleep_at_2) == condition(["pause keep", "sleep 1", "wake_up weights"])
    for texts in (["sleep 1", "wake_up weights"], ["sleep 0"], ["pause keep"], []):
        assert not engine_state.discarded(condition(texts)) and engine_state.intact(
            condition(texts)
        ) == condition(texts)


@pytest.mark.parametrize("text", ["pause keep", "pause wait"])
def test_a_joiner_is_paused_before_it_takes_requests(text: str) -> None:
    scene = Scene(replicas=1)
    scene.call(text)
    joiner = scene.start()
    assert not joiner.admitted
    assert operations(joiner) == ["pause"]
    assert joiner.ran[-1].body == RunOperation(
        operation=engine_state.Pause(mode=engine_state.InFlight.KEEP, clear_cache=True)
    )
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
        assert engine_state.equivalent(replica.condition, condition(left)), replica.replica_id
        assert replica.fenced is None and scene.state_of(replica) == "serving"
    assert operations(first) == [each.partition(" ")[0] for each in [*before, asked]], "it was there already"


def test_a_joiner_that_an_earlier_controller_paused_is_not_admitted_paused() -> None:
    scene = Scene(replicas=1)
    scene.call("pause keep")
    joiner = scene.start()
    assert engine_state.is_paused(joiner.condition) and not joiner.admitted
    scene.ask("resume")
    scene.poll(only=[scene.replicas[0]])
    scene.restart()
    scene.wait(5)
    assert joiner.admitted and not engine_state.is_paused(joiner.condition)


def test_a_fleet_without_replicas_can_be_paused_before_they_come() -> None:
    scene = Scene()
    assert scene.call("pause keep").error is None
    joiner = scene.start()
    scene.poll()
    assert operations(joiner) == ["pause"] and joiner.admitted


# -- weights that a sleep has discarded -------------------------------------------------------------


def restart(scene: Scene, *, compacted: bool = False) -> None:
    scene.journal += scene.ledger.take_decisions()
    if compacted:
        scene.journal = compact(scene.journal)
    scene.restart()
    scene.poll()


def assert_refused(scene: Scene) -> None:
    """Whatever would end in computing is refused, with what to do instead, and nothing changes."""
    before = [len(each.ran) for each in scene.replicas]
    was = scene.status().condition
    for text in ("wake_up", "wake_up weights,kv_cache", "wake_up kv_cache"):
        with pytest.raises(Conflict, match=r"discarded.*tags=weights\), update.*tags=kv_cache") as caught:
            scene.ask(text)
        assert caught.value.detail == {"tags": expected_tags(text), "condition": list(was)}
    scene.poll()
    assert [len(each.ran) for each in scene.replicas] == before
    assert scene.status().condition == was


def expected_tags(text: str) -> list[str] | None:
    wake_up = operation(text)
    assert isinstance(wake_up, engine_state.WakeUp)
    return None if wake_up.tags is None else list(wake_up.tags)


def without_weights(replicas: int = 1, **config: Any) -> Scene:
    """A fleet that has slept deeply, and has the memory of its weights again."""
    scene = Scene(replicas=replicas, **config)
    scene.call("sleep 2")
    scene.call("wake_up weights")
    return scene


def assert_awake(scene: Scene) -> None:
    for each in scene.replicas:
        assert each.admitted and not each.memory.asleep and each.memory.intact, each
    assert scene.status().condition == ()


def test_weights_that_were_thrown_away_come_back_with_a_round() -> None:
    scene = Scene(replicas=2)
    scene.call("sleep 2")
    assert_refused(scene)
    scene.call("wake_up weights")
    assert_refused(scene)
    assert report_of(scene.publish()).version == 1
    assert [each.memory.asleep for each in scene.replicas] == [{"kv_cache"}] * 2
    scene.call("wake_up kv_cache")
    assert_awake(scene)
    scene.call("sleep 2")
    assert_refused(scene)  # the next time as well


def test_waking_all_at_once_is_right_after_the_round() -> None:
    scene = without_weights()
    scene.publish()
    scene.call("wake_up")
    assert_awake(scene)


def test_a_round_that_is_aborted_brings_no_weights() -> None:
    scene = without_weights()
    scene.connect()
    round_id = scene.open()
    scene.ledger.abort_round(scene.token, round_id, "no", scene.now)
    scene.poll()
    assert_refused(scene)


@pytest.mark.parametrize("commit", list(CommitMode))
def test_a_round_that_is_not_finished_brings_no_weights(commit: CommitMode) -> None:
    scene = without_weights(replicas=2, commit=commit, max_unavailable=1)
    scene.connect()
    round_id = scene.receive()
    scene.replicas[1].hangs_in.add(Commit)
    closing = scene.close(round_id)
    scene.poll(6)
    assert scene.replicas[0].version == 1 and not closing.done
    with pytest.raises(Conflict, match="discarded"):
        scene.ask("wake_up kv_cache")
    scene.replicas[1].hangs_in.clear()
    scene.poll(6)
    assert closing.done
    scene.call("wake_up kv_cache")
    assert_awake(scene)


def test_a_joiner_after_the_round_keeps_its_weights() -> None:
    scene = without_weights()
    scene.publish()
    scene.now += 1  # in which no round came
    scene.ledger.set_stored(1, "/store/v1", None, scene.now)
    joiner = scene.start(version=0)
    scene.poll()
    assert joiner.names() == ["connect", "catch_up", "call", "call"]
    assert joiner.admitted and joiner.memory.intact and joiner.memory.asleep == {"kv_cache"}
    scene.call("wake_up kv_cache")
    assert_awake(scene)


def test_a_joiner_does_not_sleep_while_it_takes_part_in_a_round() -> None:
    scene = Scene(replicas=1)
    old = scene.replicas[0]
    scene.call("sleep 2")
    scene.call("wake_up weights")
    scene.connect()
    old.hangs_in.add(RunOperation)
    pausing = scene.ask("pause keep")  # nobody is admitted until it is through
    joiner = scene.start()
    joiner.hangs_in.add(Verify)
    round_id = scene.open()
    scene.send(round_id)
    closing = scene.close(round_id)
    scene.poll()
    old.hangs_in.clear()
    scene.poll()
    assert pausing.done and not closing.done and operations(joiner) == []
    joiner.hangs_in.clear()
    scene.poll(8)
    assert closing.done and operations(joiner) == ["sleep", "wake_up", "pause"] and joiner.admitted
    scene.call("wake_up kv_cache")
    assert_awake(scene)


@pytest.mark.parametrize("compacted", [False, True])
def test_discarded_weights_outlive_the_controller(compacted: bool) -> None:
    scene = Scene(replicas=1)
    scene.call("sleep 2")
    restart(scene, compacted=compacted)
    assert_refused(scene)
    scene.call("wake_up weights")
    restart(scene, compacted=compacted)
    assert_refused(scene)
    scene.publish()
    restart(scene, compacted=compacted)
    scene.now += 1  # in which no round came
    scene.ledger.set_stored(1, "/store/v1", None, scene.now)
    assert scene.start(version=1).memory.intact
    scene.poll()
    scene.call("wake_up kv_cache")
    assert_awake(scene)


@pytest.mark.parametrize("compacted", [False, True])
def test_what_is_done_is_not_asked_for_again_after_a_restart(compacted: bool) -> None:
    scene = Scene(replicas=2)
    for text, done in (("sleep 1", ["sleep"]), ("wake_up", ["sleep", "wake_up"])):
        scene.call(text)
        for _ in range(2):  # the second one finds what the first has noted
            restart(scene, compacted=compacted)
            assert [operations(each) for each in scene.replicas] == [done, done]


def test_weights_sleep_until_they_are_awake() -> None:
    scene = Scene(replicas=1)
    scene.connect()
    scene.call("sleep 1")
    scene.replicas[0].hangs_in.add(RunOperation)
    scene.ask("wake_up")
    with pytest.raises(Conflict, match="the fleet's weights sleep"):
        scene.open()


def test_a_sleep_counts_from_when_it_is_asked_for() -> None:
    scene = Scene(replicas=2)
    first, second = scene.replicas
    second.hangs_in.add(RunOperation)
    sleeping = scene.ask("sleep 2")
    scene.poll()
    assert not sleeping.done and not first.memory.intact
    with pytest.raises(Conflict, match="discarded"):
        scene.ask("wake_up")
    with pytest.raises(Conflict, match="the fleet's weights sleep"):
        scene.connect()
        scene.open()
    restart(scene)  # before the second has answered, and what the first did was noted
    assert_refused(scene)


def test_a_sleep_that_nobody_did_leaves_nothing_to_a_successor() -> None:
    scene = Scene(replicas=1)
    scene.replicas[0].outcomes[RunOperation] = Outcome.REJECTED
    assert scene.call("sleep 2").error is not None
    scene.replicas[0].outcomes.clear()
    restart(scene)
    assert scene.call("wake_up").error is None
    assert_awake(scene)


@pytest.mark.parametrize("level", [1, 2])
def test_nothing_sleeps_while_a_round_is_open(level: int) -> None:
    scene = Scene(replicas=1)
    scene.connect()
    round_id = scene.open()
    with pytest.raises(Conflict, match=f"cannot sleep while round {round_id} is open"):
        scene.ask(f"sleep {level}")
    assert scene.call("sleep 0").error is None  # no memory goes
    scene.send(round_id)
    closing = scene.close(round_id)
    scene.poll(8)
    assert report_of(closing).version == 1
