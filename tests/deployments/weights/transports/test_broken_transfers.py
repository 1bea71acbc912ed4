"""A transfer that breaks: the round is aborted, to be sent again, and no sound replica is fenced for it."""

import pytest

from deployments.errors import Conflict, InvalidRequest, RoundAborted, SlipstreamError, TransferAborted
from deployments.ledger.members import Task
from deployments.protocol import InstructionKind, Outcome
from tests.deployments.ledger.ledger_scene import Scene, report_of

BROKEN, REJECTED, FAILED, DONE = Outcome.BROKEN, Outcome.REJECTED, Outcome.FAILED, Outcome.DONE
CONNECT, BEGIN, RECEIVE, VERIFY = (
    InstructionKind.CONNECT,
    InstructionKind.BEGIN,
    InstructionKind.RECEIVE,
    InstructionKind.VERIFY,
)
GROUP = {"rank_offset": 1}  # what makes a connection a communicator
EACH_ALONE: dict[str, int] = {}


def scene_with(kind: InstructionKind, outcomes: tuple[Outcome, ...]) -> Scene:
    scene = Scene(replicas=len(outcomes))
    for replica, outcome in zip(scene.replicas, outcomes, strict=True):
        replica.outcomes[kind] = outcome
    return scene


def fenced(scene: Scene) -> tuple[int, ...]:
    return tuple(i for i, each in enumerate(scene.replicas) if each.fenced is not None)


@pytest.mark.parametrize("init_info", [GROUP, EACH_ALONE])
@pytest.mark.parametrize("kind", [RECEIVE, VERIFY])
@pytest.mark.parametrize(
    ("outcomes", "error", "who"),
    [
        ((BROKEN, BROKEN), TransferAborted, ()),
        ((BROKEN, DONE), TransferAborted, ()),
        ((BROKEN, FAILED), TransferAborted, (1,)),
        ((BROKEN, REJECTED), InvalidRequest, ()),  # what one has seen and refused, all would
        ((BROKEN, REJECTED, DONE), TransferAborted, (1,)),
    ],
)
def test_a_receiver_that_lost_its_peers_is_sound(
    kind: InstructionKind,
    outcomes: tuple[Outcome, ...],
    error: type[SlipstreamError],
    who: tuple[int, ...],
    init_info: dict[str, int],
) -> None:
    scene = scene_with(kind, outcomes)
    scene.connect(init_info)
    round_id = scene.open()
    task = scene.send(round_id) if kind is RECEIVE else scene.close(round_id)
    scene.poll(4)
    assert type(task.error) is error and fenced(scene) == who
    assert "r0: broken here" in task.error.message or error is InvalidRequest
    for index, replica in enumerate(scene.replicas):
        assert index in who or (replica.admitted and replica.version == 0 and "drop" in replica.kinds())


def test_whose_transfer_broke_can_be_sent_the_round_again() -> None:
    scene = scene_with(RECEIVE, (BROKEN, BROKEN))
    scene.connect(GROUP)
    error = sent(scene).error
    assert isinstance(error, RoundAborted) and error.status == 503
    assert error.detail["send_again"] is True and "send the round again" in error.message
    for replica in scene.replicas:
        replica.outcomes.clear()
    assert report_of(scene.publish()).version == 1 and fenced(scene) == ()


def sent(scene: Scene) -> Task:
    task = scene.send(scene.open())
    scene.poll()
    return task


def test_the_others_do_not_wait_for_a_member_of_the_group_that_was_lost() -> None:
    scene = Scene(replicas=3)
    scene.connect(GROUP)
    for replica in scene.replicas:
        replica.mute.add(RECEIVE)
    task = sent(scene)
    assert not task.done
    scene.ledger.lost("r1", "r1-1", "its process is gone", scene.now)
    assert isinstance(task.error, TransferAborted) and "r1: its process is gone" in task.error.message
    others = [scene.replicas[0], scene.replicas[2]]
    scene.poll(only=others)
    assert all("drop" in each.kinds() and each.admitted for each in others)


@pytest.mark.parametrize(
    ("outcomes", "error", "who"),
    [
        ((FAILED, None), TransferAborted, (0,)),
        ((DONE, FAILED, None), TransferAborted, (1,)),
        ((BROKEN, None), None, ()),
    ],
)
def test_the_others_do_not_wait_for_a_member_that_is_broken_itself(
    outcomes: tuple[Outcome | None, ...], error: type[SlipstreamError] | None, who: tuple[int, ...]
) -> None:
    scene = Scene(replicas=len(outcomes))
    for replica, outcome in zip(scene.replicas, outcomes, strict=True):
        if outcome is None:
            replica.mute.add(RECEIVE)
        else:
            replica.outcomes[RECEIVE] = outcome
    scene.connect(GROUP)
    task = sent(scene)
    assert (None if task.error is None else type(task.error)) is error and fenced(scene) == who
    assert ("drop" in scene.replicas[-1].kinds()) is (error is not None)


def test_a_member_that_was_lost_before_the_first_byte_ends_the_sending_at_once() -> None:
    scene = Scene(replicas=2)
    scene.connect(GROUP)
    round_id = scene.open()
    scene.ledger.lost("r1", "r1-1", "its process is gone", scene.now)
    assert isinstance(scene.send(round_id).error, TransferAborted)


def test_who_has_everything_needs_the_lost_member_no_more() -> None:
    scene = Scene(replicas=2)
    scene.replicas[1].mute.add(RECEIVE)
    scene.connect(GROUP)
    round_id = scene.open()
    task = scene.send(round_id)
    scene.poll()
    scene.ledger.lost("r1", "r1-1", "its process is gone", scene.now)
    assert task.done and task.error is None
    closed = scene.close(round_id)
    scene.poll(8, only=scene.replicas[:1])
    assert set(report_of(closed).replicas) == {"r0"}


def test_replicas_that_receive_each_alone_go_on_without_the_lost_one() -> None:
    scene = Scene(replicas=2)
    scene.connect(EACH_ALONE)
    for replica in scene.replicas:
        replica.mute.add(RECEIVE)
    task = sent(scene)
    scene.ledger.lost("r1", "r1-1", "its process is gone", scene.now)
    assert not task.done
    scene.replicas[0].mute.clear()
    scene.poll(2, only=scene.replicas[:1])
    assert task.done and task.error is None


def test_with_too_few_left_sending_again_is_no_use() -> None:
    scene = Scene(replicas=2, min_replicas=2)
    scene.connect(GROUP)
    scene.replicas[0].mute.add(RECEIVE)
    task = sent(scene)
    scene.ledger.lost("r1", "r1-1", "its process is gone", scene.now)
    assert type(task.error) is RoundAborted and "send_again" not in task.error.detail


def test_a_meeting_that_a_lost_member_cannot_come_to_ends_at_once() -> None:
    scene = Scene(replicas=3)
    for replica in scene.replicas:
        replica.mute.add(CONNECT)
    task = scene.connect(GROUP)
    assert not task.done
    scene.ledger.lost("r1", "r1-1", "its process is gone", scene.now)
    assert isinstance(task.error, Conflict) and task.error.detail["connect_again"]
    assert "r1: its process is gone" in task.error.message
    others = [scene.replicas[0], scene.replicas[2]]
    for replica in others:
        replica.mute.clear()
    scene.poll(only=others)
    assert all("drop" in each.kinds() and each.admitted for each in others)
    scene.connect(GROUP)
    closed = scene.close(scene.open())
    scene.poll(8, only=others)
    assert set(report_of(closed).replicas) == {"r0", "r2"}


def test_replicas_that_connect_each_alone_go_on_without_the_lost_one() -> None:
    scene = Scene(replicas=2)
    for replica in scene.replicas:
        replica.mute.add(CONNECT)
    task = scene.connect(EACH_ALONE)
    scene.ledger.lost("r1", "r1-1", "its process is gone", scene.now)
    assert not task.done


@pytest.mark.parametrize("lost", ["expired", "taken anew"])
def test_nobody_waits_at_a_meeting_for_a_publisher_that_is_gone(lost: str) -> None:
    scene = Scene(replicas=2, lease_s=5.0)
    for replica in scene.replicas:
        replica.mute.add(CONNECT)
    task = scene.connect(GROUP)
    if lost == "expired":
        scene.wait(6.0)
    else:
        scene.token = scene.ledger.acquire("trainer", scene.now).token
    assert isinstance(task.error, Conflict)
    scene.poll()
    assert all("drop" in each.kinds() and each.fenced is None for each in scene.replicas)


@pytest.mark.parametrize(
    ("outcomes", "error", "who"),
    [
        ((BROKEN, BROKEN), Conflict, ()),
        ((BROKEN, DONE), Conflict, ()),
        ((BROKEN, FAILED), Conflict, (1,)),
        ((BROKEN, REJECTED), Conflict, ()),
        ((FAILED, FAILED), InvalidRequest, ()),
    ],
)
def test_who_met_nobody_is_asked_to_connect_again(
    outcomes: tuple[Outcome, ...], error: type[SlipstreamError], who: tuple[int, ...]
) -> None:
    scene = scene_with(CONNECT, outcomes)
    task = scene.connect(GROUP)
    assert type(task.error) is error and fenced(scene) == who
    assert bool(task.error.detail.get("connect_again")) is (error is Conflict)
    for replica in scene.replicas:
        replica.outcomes.clear()
    scene.poll()
    assert report_of(scene.publish()).version == 1
