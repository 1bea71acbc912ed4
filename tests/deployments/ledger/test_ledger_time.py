"""Deadlines, heartbeats, leases, calls out of order, and calls that come again."""

import pytest

from deployments.ledger.decisions import decode, encode
from deployments.ledger.state import PendingCall
from deployments.protocol import errors
from deployments.protocol.engine_state import Sleep
from deployments.protocol.poll import Body, Commit, Outcome, Receive, Release, RunOperation, Verify
from deployments.protocol.publishing import RoundOptions
from tests.deployments.ledger.compacted import compact
from tests.deployments.ledger.ledger_scene import Scene, report_of


@pytest.mark.parametrize(("kind", "limit_s"), [(Receive, 20), (Verify, 20), (Commit, 10), (Release, 10)])
def test_a_missed_deadline_fences(kind: type[Body], limit_s: int) -> None:
    scene = Scene(replicas=2, stage_timeout_s=20, commit_timeout_s=10, grace_s=2)
    scene.replicas[0].hangs_in.add(kind)
    task = scene.publish()
    scene.wait(limit_s + 1)
    assert scene.replicas[0].fenced is None, "the grace period has not passed"
    scene.wait(3)
    assert scene.replicas[0].fenced == f"missed the deadline of {kind.name} ({limit_s} s)"
    scene.poll(6)
    assert report_of(task).phase == "committed" and scene.replicas[1].admitted


def test_a_silent_member_is_lost_and_fenced_if_it_comes_back() -> None:
    scene = Scene(replicas=2, heartbeat_timeout_s=10)
    silent, other = scene.replicas
    epoch = scene.status().epoch
    for _ in range(12):
        scene.now += 1
        scene.poll(1, only=[other])
        scene.ledger.tick(scene.now)
    assert scene.state_of(silent) == "gone"
    assert scene.status().epoch == epoch + 1
    scene.poll(1)
    assert silent.fenced is not None and "silent" in silent.fenced and not silent.admitted


def test_time_in_which_the_controller_stood_still_is_nobodys_delay() -> None:
    scene = Scene(replicas=2, heartbeat_timeout_s=10, stage_timeout_s=20, grace_s=0, lease_s=30)
    scene.connect()
    scene.replicas[0].hangs_in.add(Receive)
    call = scene.send(scene.open())
    scene.wait(8)
    for _ in range(2):
        scene.now += 1000
        scene.ledger.credit(1000, scene.now)
        scene.ledger.tick(scene.now)
    assert [scene.state_of(each) for each in scene.replicas] == ["serving", "serving"]
    assert scene.ledger.renew(scene.token, scene.now) and not call.done
    scene.wait(11)
    assert scene.replicas[0].fenced is None, "of its 20 s it has used 19"
    scene.wait(2)
    scene.poll(1)
    assert scene.replicas[0].fenced == "missed the deadline of receive (20 s)"
    scene.wait(11, poll=False)
    assert scene.status().members == ()


def test_an_expired_lease_aborts_its_open_round_and_frees_the_fleet() -> None:
    scene = Scene(replicas=1, lease_s=30)
    scene.connect()
    round_id = scene.open()
    with pytest.raises(errors.Conflict, match=r"'trainer' publishes; its lease ends in 30\.0 s"):
        scene.ledger.acquire("other", scene.now)
    scene.wait(31)
    with pytest.raises(errors.StalePublisher):
        scene.ledger.send(scene.token, round_id, {}, scene.now)
    assert scene.ledger.history()[-1].reason == f"round {round_id} aborted: the lease of 'trainer' expired"
    assert scene.ledger.acquire("other", scene.now).token > scene.token


def test_whoever_knocks_does_not_keep_the_round_of_a_publisher_that_is_gone() -> None:
    scene = Scene(replicas=1, lease_s=30)
    scene.connect()
    scene.open()
    token, gone = scene.token, scene.now
    assert scene.ledger.join_lease("trainer", scene.now, renew=True).remaining_s == 30
    while scene.now < gone + 30:  # a trainer that was started anew, and asks every other second
        session = scene.ledger.join_lease("trainer", scene.now, renew=False)
        assert session.lease.token == token and session.round_id is not None
        assert session.remaining_s == pytest.approx(gone + 30 - scene.now)
        scene.wait(2)
    session = scene.ledger.join_lease("trainer", scene.now, renew=False)
    assert session.lease.token > token and session.round_id is None
    assert scene.ledger.history()[-1].reason.endswith("the lease of 'trainer' expired")


def test_a_lease_of_calls_without_a_token_gives_way_between_rounds() -> None:
    scene = Scene(replicas=1, lease_s=30)
    token = scene.ledger.join_lease("http", scene.now, renew=False).lease.token
    scene.ledger.connect(token, {}, scene.now)
    with pytest.raises(errors.Conflict, match="'http' publishes"):
        scene.ledger.acquire("trainer", scene.now)
    scene.poll()
    assert scene.status().lease is None, "it has connected, and no round is open"
    round_id = scene.ledger.open_round(token, RoundOptions(), scene.now)
    with pytest.raises(errors.Conflict, match="'http' publishes"):
        scene.ledger.acquire("trainer", scene.now)
    assert scene.ledger.join_lease("http", scene.now, renew=False).lease.token == token
    scene.ledger.abort_round(token, round_id, "enough", scene.now)
    scene.wait(31)
    assert not [each for each in scene.ledger.events_since(0) if each.name == "lease_expired"]
    assert scene.ledger.join_lease("http", scene.now, renew=False).lease.token > token
    assert scene.ledger.acquire("trainer", scene.now).token > token
    with pytest.raises(errors.Conflict, match="'trainer' publishes"):
        scene.ledger.join_lease("http", scene.now, renew=False)


def test_the_lease_does_not_run_out_while_its_publisher_waits_for_the_close() -> None:
    scene = Scene(replicas=1, lease_s=5, stage_timeout_s=60)
    scene.replicas[0].hangs_in.add(Verify)
    task = scene.publish()
    scene.wait(30)
    scene.replicas[0].hangs_in.clear()
    scene.poll(6)
    assert report_of(task).phase == "committed"


def test_a_publisher_that_is_lost_in_its_commit_keeps_others_waiting_for_seconds() -> None:
    scene = Scene(replicas=1, lease_s=60)
    scene.replicas[0].hangs_in.add(Commit)
    call = scene.publish()
    scene.wait(20)
    scene.replicas[0].hangs_in.clear()
    scene.poll(6)
    assert report_of(call).phase == "committed"
    scene.wait(6)
    assert scene.ledger.acquire("another", scene.now).publisher == "another"


def test_a_publisher_that_comes_again_gets_a_new_token_and_its_old_round_is_gone() -> None:
    scene = Scene(replicas=1)
    scene.connect()
    round_id, old = scene.open(), scene.token
    new = scene.ledger.acquire("trainer", scene.now).token
    assert new > old
    with pytest.raises(errors.StalePublisher):
        scene.ledger.connect(old, {}, scene.now)
    with pytest.raises(errors.RoundAborted, match="took a new lease"):
        scene.ledger.send(new, round_id, {}, scene.now)


def test_calls_out_of_order_say_what_is_open() -> None:
    scene = Scene()
    scene.token = scene.ledger.acquire("trainer", scene.now).token
    with pytest.raises(errors.FleetUnavailable):
        scene.ledger.connect(scene.token, {}, scene.now)
    scene.start()
    scene.connect()
    round_id = scene.open()
    with pytest.raises(errors.Conflict, match="round 1 is open: close or abort it"):
        scene.open()
    with pytest.raises(errors.Conflict, match="cannot connect while round 1 is open"):
        scene.ledger.connect(scene.token, {}, scene.now)
    scene.send(round_id)
    scene.close(round_id)
    with pytest.raises(errors.Conflict, match="round 1 is verifying, expected open"):
        scene.send(round_id)
    scene.poll(6)
    with pytest.raises(errors.Conflict, match="no round is open; the fleet is at version 1"):
        scene.ledger.abort_round(scene.token, round_id, "too late", scene.now)


def test_a_rejected_call_is_the_callers_fault_and_fences_nobody() -> None:
    scene = Scene(replicas=2)
    scene.replicas[0].outcomes[RunOperation] = Outcome.REJECTED
    task = scene.ledger.call(Sleep(level=9), scene.now)
    scene.poll()
    assert isinstance(task.error, errors.InvalidRequest) and "r0: rejected here" in task.error.message
    assert all(each.admitted for each in scene.replicas)


# -- a close that comes again: its publisher had no answer ------------------------------------------


def close_again(scene: Scene, token: int, round_id: int, label: str | None = None) -> PendingCall:
    return scene.ledger.close_round(token, round_id, label, scene.now)


@pytest.mark.parametrize("restarts", [0, 1, 2])
@pytest.mark.parametrize("label", ["two", None])
def test_who_closes_it_with_another_label_is_told_that_theirs_is_not_published(
    restarts: int, label: str | None
) -> None:
    """Two trainers over HTTP share a lease: a close that comes late meets the other one's round."""
    scene = Scene(replicas=2)
    report = report_of(scene.publish(label="one"))
    for _ in range(restarts):
        scene.restart()
    with pytest.raises(
        errors.Conflict, match=f"with the label 'one', by another publisher.* as {label!r} was not"
    ):
        close_again(scene, scene.token, report.round_id, label)
    assert report_of(close_again(scene, scene.token, report.round_id, "one")) == report


def test_nobody_closes_with_another_label_what_is_being_closed() -> None:
    scene = Scene(replicas=2)
    for replica in scene.replicas:
        replica.hangs_in.add(Verify)
    closing = scene.publish(label="one")
    with pytest.raises(errors.Conflict, match="by another publisher"):
        close_again(scene, scene.token, 1, "two")
    assert close_again(scene, scene.token, 1, "one") is closing


def test_a_decided_round_is_answered_when_the_successor_has_finished_it() -> None:
    scene = Scene(replicas=2)
    for replica in scene.replicas:
        replica.hangs_in.add(Commit)
    first = scene.publish(label="one")
    assert not first.done
    scene.restart()
    again = close_again(scene, scene.token, 1, "one")
    assert not again.done and close_again(scene, scene.token, 1, "one") is again
    for replica in scene.replicas:
        replica.hangs_in.clear()
    scene.poll(8)
    report = report_of(again)
    assert (report.round_id, report.version, report.label) == (1, 1, "one")
    assert set(report.replicas) == {"r0", "r1"}
    assert scene.ledger.history() == [report]


@pytest.mark.parametrize("restarts", [1, 2])
@pytest.mark.parametrize("compacted", [False, True])
def test_an_undecided_round_of_a_predecessor_is_to_be_sent_again(restarts: int, compacted: bool) -> None:
    scene = Scene(replicas=1)
    scene.replicas[0].hangs_in.add(Verify)
    scene.publish()
    for _ in range(restarts):
        scene.restart()
        if compacted:
            scene.journal = compact([decode(encode(each)) for each in scene.journal])
    with pytest.raises(errors.TransferAborted, match="round 1 aborted: the controller restarted") as caught:
        again = close_again(scene, scene.token, 1)
        assert again.error is not None
        raise again.error
    assert caught.value.detail == {"round_id": 1, "send_again": True}
    assert [(each.round_id, each.phase) for each in scene.ledger.history()] == [(1, "aborted")]


def test_a_round_that_was_aborted_raises_why_also_after_a_restart() -> None:
    scene = Scene(replicas=2)
    scene.replicas[0].digest = "bb"
    error = scene.publish().error  # no majority
    assert error is not None
    assert close_again(scene, scene.token, 1).error is error
    scene.restart()
    after = close_again(scene, scene.token, 1).error
    assert isinstance(after, errors.RoundAborted) and not isinstance(after, errors.TransferAborted)
    assert "replicas disagree" in after.message


def test_a_round_is_known_by_its_number_and_not_by_its_version() -> None:
    """A's round is aborted by the restart, and B commits the version that A wanted."""
    scene = Scene(replicas=1)
    scene.replicas[0].hangs_in.add(Verify)
    scene.publish(label="A")
    old_token = scene.token
    scene.restart()
    scene.replicas[0].hangs_in.clear()
    scene.poll(4)
    other = report_of(scene.publish(label="B"))
    assert (other.version, other.round_id) == (1, 2)
    assert isinstance(close_again(scene, old_token, 1).error, errors.TransferAborted)
    with pytest.raises(errors.StalePublisher):  # what is not in the record needs the lease
        close_again(scene, old_token, 3)
