from typing import Any

import pytest

from deployments.protocol.engine_state import WakeUp
from deployments.protocol.errors import Conflict
from deployments.protocol.poll import Commit, CommitMode, Outcome, RunOperation, Verify
from tests.deployments.ledger.compacted import compact
from tests.deployments.ledger.ledger_scene import Scene, operation, operations, report_of


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
    assert isinstance(wake_up, WakeUp)
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


def test_a_joiner_before_the_round_takes_part_in_it() -> None:
    scene = without_weights()
    joiner = scene.start()
    scene.poll()
    assert joiner.admitted and not joiner.memory.intact
    assert_refused(scene)
    scene.publish()
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
