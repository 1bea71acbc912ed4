"""How many replicas the operator wants, and replicas that are stopped in order."""

import pytest

from deployments.protocol.errors import Conflict, InvalidRequest
from deployments.protocol.ledger_config import SizeLimits
from deployments.protocol.poll import RunOperation
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.ledger.ledger_scene import Scene, report_of

ELASTIC = SizeLimits(least=1, most=4, wanted=2, fixed=None)


def events(scene: Scene) -> list[str]:
    return [event.name for event in scene.ledger.events_since(0)]


def leave(scene: Scene, replica: FakeReplica) -> None:
    """Serve stops it: no request is running on it."""
    replica.leaving = replica.drained = True
    scene.poll(1)


def go(scene: Scene, replica: FakeReplica) -> None:
    """Its process says goodbye, and ends."""
    replica.ended = True
    scene.poll(1, only=[replica])
    scene.replicas.remove(replica)


# -- what the operator wants ------------------------------------------------------------------------


def test_a_wish_reaches_every_replica_and_survives_a_restart() -> None:
    scene = Scene(replicas=2, size=ELASTIC)
    assert scene.replicas[0].wanted == 2
    size = scene.ledger.scale(4, scene.now)
    assert (size.wanted, size.running, size.joining) == (4, 2, 0)
    assert size.problem == "2 of 4 replicas have not registered yet: they start, or wait for free GPUs"
    scene.poll(1)
    assert [replica.wanted for replica in scene.replicas] == [4, 4]
    scene.restart()
    assert scene.status().size.wanted == 4
    scene.ledger.scale(None, scene.now)
    scene.restart()
    assert scene.status().size.wanted is None


@pytest.mark.parametrize(
    ("size", "wanted", "error", "words"),
    [
        (ELASTIC, 5, InvalidRequest, "expected 1 to 4 ('engine.min_replicas' and 'engine.max_replicas')"),
        (ELASTIC, 0, InvalidRequest, "got 0"),
        (SizeLimits(fixed="its slots are"), 1, Conflict, "the number of replicas is fixed: its slots are"),
    ],
)
def test_a_wish_that_cannot_come_true_is_refused(
    size: SizeLimits, wanted: int, error: type[Exception], words: str
) -> None:
    scene = Scene(replicas=2, size=size)
    with pytest.raises(error, match=words.replace("(", r"\(").replace(")", r"\)")):
        scene.ledger.scale(wanted, scene.now)
    assert scene.status().size.wanted == size.wanted


def test_a_poll_that_waits_is_answered_when_the_wish_changes() -> None:
    scene = Scene(replicas=1, size=ELASTIC)
    report = scene.replicas[0].report()
    assert not scene.ledger.has_updates(report)
    scene.ledger.scale(3, scene.now)
    assert scene.ledger.has_updates(report)


def test_a_round_needs_no_more_replicas_than_are_wanted() -> None:
    scene = Scene(replicas=1, size=ELASTIC, min_replicas=2)
    assert not scene.status().ready
    scene.ledger.scale(1, scene.now)
    assert scene.status().ready
    assert report_of(scene.publish()).version == 1


# -- replicas that leave ---------------------------------------------------------------------------


def test_a_replica_that_still_answers_takes_part_in_rounds() -> None:
    scene = Scene(replicas=2, size=ELASTIC)
    leaver = scene.replicas[1]
    leaver.leaving = True
    assert report_of(scene.publish()).version == 1
    assert (scene.state_of(leaver), leaver.version, leaver.admitted) == ("leaving", 1, False)
    assert not leaver.may_leave


def test_a_replica_that_answers_nothing_any_more_leaves_between_rounds() -> None:
    scene = Scene(replicas=3, size=ELASTIC)
    scene.connect()
    round_id = scene.receive()
    leaver = scene.replicas[2]
    leave(scene, leaver)
    assert not leaver.may_leave, "it is in a round"
    call = scene.close(round_id)
    scene.poll(8)
    assert len(report_of(call).replicas) == 3
    assert leaver.may_leave
    go(scene, leaver)
    assert scene.state_of(leaver) == "gone"
    assert "fence" not in events(scene) and "lost" not in events(scene) and events(scene)[-1] == "left"
    assert report_of(scene.publish()).version == 2


def test_a_new_round_is_without_it() -> None:
    scene = Scene(replicas=2, size=ELASTIC)
    scene.connect()
    leaver = scene.replicas[1]
    leave(scene, leaver)
    report = report_of(scene.publish())
    assert list(report.replicas) == ["r0"]
    scene.poll()
    assert leaver.may_leave and leaver.fenced is None, "at the old version, and answering nothing"


def test_it_leaves_while_others_are_in_a_round_but_with_no_instruction_on_its_way() -> None:
    scene = Scene(replicas=2, size=ELASTIC)
    scene.connect()
    leaver = scene.replicas[1]
    leaver.hangs_in.add(RunOperation)
    scene.ask("is_paused")
    leave(scene, leaver)
    scene.receive()
    assert not leaver.may_leave
    leaver.hangs_in.clear()
    scene.poll()
    assert leaver.may_leave and scene.status().round is not None


def test_no_operation_is_asked_of_it() -> None:
    scene = Scene(replicas=2, size=ELASTIC)
    leave(scene, scene.replicas[1])
    call = scene.call("pause keep")
    assert call.error is None and list(call.result) == ["r0"]


def test_one_that_ends_in_mid_round_is_lost() -> None:
    scene = Scene(replicas=2, size=ELASTIC)
    scene.connect()
    round_id = scene.receive()
    leaver = scene.replicas[1]
    leave(scene, leaver)
    go(scene, leaver)
    assert "lost" in events(scene)
    call = scene.close(round_id)
    scene.poll(8)
    assert list(report_of(call).replicas) == ["r0"]


def test_a_successor_does_not_wait_for_one_that_left() -> None:
    scene = Scene(replicas=2, size=ELASTIC)
    leaver = scene.replicas[1]
    leave(scene, leaver)
    go(scene, leaver)
    scene.restart()
    assert [member.replica_id for member in scene.status().members] == ["r0"]


def test_one_whose_process_ends_after_it_was_let_go_is_no_fault() -> None:
    scene = Scene(replicas=2, size=ELASTIC)
    leaver = scene.replicas[1]
    leave(scene, leaver)
    scene.ledger.lost([(leaver.replica_id, leaver.incarnation)], "its process is gone", scene.now)
    assert events(scene)[-1] == "left"
