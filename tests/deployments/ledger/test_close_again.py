"""A close that comes again: its publisher had no answer, because the controller died or the call was lost."""

import pytest

from deployments.ledger.decisions import decode, encode
from deployments.ledger.state import PendingCall
from deployments.protocol.errors import Conflict, RoundAborted, StalePublisher, TransferAborted
from deployments.protocol.poll import Commit, Verify
from tests.deployments.ledger.compacted import compact
from tests.deployments.ledger.ledger_scene import Scene, report_of


def close_again(scene: Scene, token: int, round_id: int, label: str | None = None) -> PendingCall:
    return scene.ledger.close_round(token, round_id, label, scene.now)


@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_a_committed_round_is_answered_with_its_report(restarts: int) -> None:
    scene = Scene(replicas=2)
    report = report_of(scene.publish(label="one"))
    for _ in range(restarts):
        scene.restart()
    again = close_again(scene, scene.token, report.round_id, "one")
    assert report_of(again) == report
    assert scene.ledger.state.committed_version == 1


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("label", ["two", None])
def test_who_closes_it_with_another_label_is_told_that_theirs_is_not_published(
    restarts: int, label: str | None
) -> None:
    """Two trainers over HTTP share a lease: a close that comes late meets the other one's round."""
    scene = Scene(replicas=2)
    report = report_of(scene.publish(label="one"))
    for _ in range(restarts):
        scene.restart()
    with pytest.raises(Conflict, match=f"with the label 'one', by another publisher.* as {label!r} was not"):
        close_again(scene, scene.token, report.round_id, label)
    assert report_of(close_again(scene, scene.token, report.round_id, "one")) == report


def test_nobody_closes_with_another_label_what_is_being_closed() -> None:
    scene = Scene(replicas=2)
    for replica in scene.replicas:
        replica.hangs_in.add(Verify)
    closing = scene.publish(label="one")
    with pytest.raises(Conflict, match="by another publisher"):
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
    with pytest.raises(TransferAborted, match="round 1 aborted: the controller restarted") as caught:
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
    assert isinstance(after, RoundAborted) and not isinstance(after, TransferAborted)
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
    assert isinstance(close_again(scene, old_token, 1).error, TransferAborted)
    with pytest.raises(StalePublisher):  # what is not in the record needs the lease
        close_again(scene, old_token, 3)
