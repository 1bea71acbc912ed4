import pytest

from deployments.ledger.decisions import Committed, Ended
from deployments.protocol.errors import FleetUnavailable
from deployments.protocol.poll import Commit, CommitMode, Outcome, Verify
from deployments.protocol.publishing import RoundOptions
from tests.deployments.ledger.compacted import compact
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.ledger.ledger_scene import Scene, report_of


def test_an_undecided_round_is_gone_after_a_restart_and_its_staging_is_dropped() -> None:
    scene = Scene(replicas=1)
    scene.replicas[0].hangs_in.add(Commit)
    scene.connect()
    round_id = scene.receive()
    scene.close(round_id)
    scene.poll(1)  # verified here; the acknowledgement never arrives
    scene.restart()
    scene.poll()
    assert scene.ledger.state.committed_version == 0
    assert "drop" in scene.replicas[0].names() and scene.replicas[0].admitted
    assert scene.status().round is None


def test_rounds_that_ended_are_counted_on_after_a_restart() -> None:
    scene = Scene(replicas=1)
    scene.connect()
    counts = []

    def count() -> None:
        counts.append(tuple(scene.status().rounds_ended[outcome] for outcome in ("committed", "aborted")))

    for _ in range(2):
        report_of(scene.publish())
    count()
    scene.open()
    count()  # it is open
    scene.restart()  # which aborts it
    count()
    scene.journal[:] = compact(scene.journal)
    scene.restart()
    scene.poll(3)
    scene.connect()
    report_of(scene.publish())
    count()
    assert counts == [(2, 0), (2, 0), (2, 1), (3, 1)]


def test_a_version_says_which_drafter_it_has_also_after_a_restart() -> None:
    scene = Scene(replicas=2)
    found = []
    for came in (None, False, True, False):
        for replica in scene.replicas:
            replica.drafter = came
        found.append((report_of(scene.publish()).drafter, scene.status().drafter))
    assert found == [(None, None), (0, 0), (3, 3), (3, 3)]
    scene.journal += scene.ledger.take_decisions()
    scene.journal[:] = compact(scene.journal)
    scene.restart()
    assert (scene.status().committed_version, scene.status().drafter) == (4, 3)
    scene.poll(3)
    scene.connect()
    assert report_of(scene.publish()).drafter == 3


@pytest.mark.parametrize("commit", list(CommitMode))
@pytest.mark.parametrize("swapped", [0, 1, 2])
def test_a_decided_round_is_finished_after_a_restart(commit: CommitMode, swapped: int) -> None:
    scene = Scene(replicas=2, commit=commit, max_unavailable=2)
    for replica in scene.replicas[swapped:]:
        replica.hangs_in.add(Commit)
    scene.publish()
    scene.restart()
    for replica in scene.replicas:
        replica.hangs_in.clear()
    scene.poll(6)
    assert [each.version for each in scene.replicas] == [1, 1]
    assert all(each.admitted and not each.held for each in scene.replicas)
    assert [type(each) for each in scene.journal if isinstance(each, Committed | Ended)] == [Committed, Ended]


def test_a_replica_that_swapped_is_released_although_the_only_other_one_is_fenced() -> None:
    """It swapped to wait for the other one. A controller that knows of one participant must say so too."""
    scene = Scene(replicas=2, commit=CommitMode.TOGETHER)
    swapped, broken = scene.replicas
    swapped.hangs_in.add(Commit)
    broken.outcomes[Commit] = Outcome.REPLICA_FAILED
    scene.publish()
    scene.poll(3)
    assert broken.fenced is not None
    swapped.hangs_in.clear()
    scene.ledger.poll(swapped.report(), scene.now)  # COMMIT is on its way
    swapped.take(scene.ledger.poll(swapped.report(), scene.now))
    assert swapped.held
    scene.restart()
    scene.poll(4)
    assert swapped.version == 1 and not swapped.held


def test_after_a_restart_nobody_is_released_while_one_without_its_staging_serves_the_old_version() -> None:
    scene = Scene(replicas=2, commit=CommitMode.TOGETHER)
    swapped, stale = scene.replicas
    for replica in scene.replicas:
        replica.hangs_in.add(Commit)
    scene.publish()
    scene.restart()
    swapped.hangs_in.clear()
    stale.staged_round = None
    scene.ledger.on_report(stale.report(), scene.now)  # what it is told is lost on the way
    scene.poll(4, only=[swapped])
    assert swapped.held and stale.version == 0 and stale.fenced is None
    scene.poll(4)
    assert stale.fenced is not None and swapped.version == 1 and not swapped.held


def test_a_commit_that_comes_again_after_a_restart_fences_nobody() -> None:
    """A replica may be swapping while the controller restarts: it registers with the old version."""
    scene = Scene(replicas=2)
    for replica in scene.replicas:
        replica.hangs_in.add(Commit)
    scene.publish()
    before = [replica.report() for replica in scene.replicas]
    for replica in scene.replicas:
        replica.hangs_in.clear()
    scene.poll(1)  # they swap, and the controller restarts before it learns so
    scene.restart()
    for report in before:
        scene.ledger.poll(report, scene.now)
    scene.poll(6)
    assert [each.names().count("commit") for each in scene.replicas] == [2, 2]
    assert all(each.admitted and each.version == 1 and not each.held for each in scene.replicas)


def test_a_participant_that_never_returns_does_not_hold_a_resumed_round_for_ever() -> None:
    scene = Scene(replicas=2, heartbeat_timeout_s=10)
    for replica in scene.replicas:
        replica.hangs_in.add(Commit)
    scene.publish()
    scene.restart()
    gone = scene.replicas.pop()
    scene.replicas[0].hangs_in.clear()
    scene.poll()
    assert scene.replicas[0].held
    scene.wait(12)
    scene.poll()
    assert not scene.replicas[0].held and scene.replicas[0].version == 1
    assert set(scene.ledger.history()[-1].fenced) == {gone.replica_id}


def test_a_swap_that_fails_for_a_controller_that_has_died_is_not_forgotten() -> None:
    """Its successor does not know the instruction. The replica takes no request any more, and nobody would
    replace it."""
    scene = Scene(replicas=2)
    one, other = scene.replicas
    for replica in scene.replicas:
        replica.hangs_in.add(Commit)
    scene.publish()
    one.outcomes[Commit] = Outcome.REPLICA_FAILED
    for replica in scene.replicas:
        replica.hangs_in.clear()
    scene.poll(1)  # they swap, and the controller restarts before it learns what came of it
    assert one.failed and one.fenced is None
    one.outcomes.clear()
    scene.restart()
    scene.poll(6)
    assert one.fenced is not None and "replica_failed here" in one.fenced
    assert other.admitted and scene.ledger.state.committed_version == other.version == 1


def test_no_round_opens_after_a_restart_before_all_who_served_have_polled() -> None:
    scene = Scene(replicas=2)
    scene.restart()
    scene.poll(1, only=scene.replicas[:1])
    scene.token = scene.ledger.acquire("trainer", scene.now).token
    scene.ledger.connect(scene.token, {}, scene.now)
    scene.poll(2, only=scene.replicas[:1])
    with pytest.raises(FleetUnavailable, match=r"replicas \['r1'\] have not polled yet"):
        scene.ledger.open_round(scene.token, RoundOptions(), scene.now)
    scene.poll(1)
    scene.ledger.open_round(scene.token, RoundOptions(), scene.now)


def test_a_report_from_before_the_restart_that_comes_late_says_nothing_about_who_serves() -> None:
    """It names an older version. Its replica serves the committed one, and no round may pass it over."""
    scene = Scene(replicas=2)
    late = scene.replicas[1].report()
    scene.publish()
    scene.restart()
    scene.poll(1, only=scene.replicas[:1])
    with pytest.raises(FleetUnavailable, match="overtook"):
        scene.ledger.poll(late, scene.now)
    scene.token = scene.ledger.acquire("trainer", scene.now).token
    with pytest.raises(FleetUnavailable, match=r"replicas \['r1'\] have not polled yet"):
        scene.ledger.open_round(scene.token, RoundOptions(), scene.now)
    scene.poll(1)
    assert report_of(scene.publish()).version == 2
    assert all(each.admitted and each.version == 2 for each in scene.replicas)


def test_a_replica_that_lost_its_staging_in_a_restart_still_joins_after_another_one() -> None:
    scene = Scene(replicas=2, commit=CommitMode.ROLLING)
    stale = scene.replicas[1]
    for replica in scene.replicas:
        replica.hangs_in.add(Commit)
    scene.publish()
    scene.restart()
    for replica in scene.replicas:
        replica.hangs_in.clear()
    stale.staged_round = None
    scene.poll(4)
    assert stale.version == 0 and not stale.admitted
    scene.restart()
    scene.poll(1)
    assert report_of(scene.publish()).version == 2
    scene.poll(4)
    assert stale.fenced is None and stale.admitted and stale.version == 2


def test_a_fence_and_the_tokens_outlive_a_restart() -> None:
    scene = Scene(replicas=2)
    scene.replicas[0].outcomes[Verify] = Outcome.REPLICA_FAILED
    scene.publish()
    token, epoch = scene.token, scene.status().epoch
    scene.restart()
    assert scene.status().epoch == epoch
    revenant = FakeReplica(replica_id="r0", incarnation="r0-1", version=1)
    scene.poll(1, only=[revenant])
    assert revenant.fenced == "verify: replica_failed here" and not revenant.admitted
    assert scene.ledger.acquire("trainer", scene.now).token == token + 1


def test_after_a_restart_nobody_swaps_before_a_fenced_replica_says_so() -> None:
    """It does not know, and may serve what the fleet replaces."""
    scene = Scene(replicas=2)
    good, bad = scene.replicas
    bad.failed = "its engine died"
    scene.ledger.poll(bad.report(), scene.now)  # the answer is lost
    scene.restart()
    scene.poll(1, only=[good])
    scene.token = scene.ledger.acquire("trainer", scene.now).token
    scene.ledger.connect(scene.token, {}, scene.now)
    scene.poll(2, only=[good])
    round_id = scene.open()
    scene.send(round_id)
    scene.poll(3, only=[good])
    task = scene.close(round_id)
    scene.poll(6, only=[good])
    assert not task.done and good.version == 0
    scene.poll(6)
    assert report_of(task).version == good.version == 1


def test_a_joiner_far_behind_that_staged_the_round_finishes_it_after_a_restart() -> None:
    scene = Scene(replicas=1)
    for _ in range(2):
        report_of(scene.publish())
    joiner = scene.start()
    for replica in scene.replicas:
        replica.hangs_in.add(Commit)
    scene.close(scene.receive())
    scene.poll(4)
    scene.restart()
    for replica in scene.replicas:
        replica.hangs_in.clear()
    scene.poll(6)
    assert [each.version for each in scene.replicas] == [3, 3] and joiner.admitted


def test_one_that_left_in_order_may_be_behind_after_a_restart() -> None:
    scene = Scene(replicas=2)
    left = scene.replicas[1]
    left.leaving = left.drained = True
    scene.poll(1)
    report_of(scene.publish())
    scene.restart()
    left.ended = True
    scene.poll(1)
    assert scene.state_of(left) == "gone" and scene.replicas[0].admitted


def test_a_label_outlives_a_restart_but_not_its_version() -> None:
    scene = Scene(replicas=1)
    scene.publish(label="one")
    scene.ledger.set_label("uno", scene.now)
    scene.restart()
    assert scene.status().label == "uno"
    scene.poll(1)
    scene.publish(label="two")
    scene.restart()
    assert scene.status().label == "two"


def test_sequence_numbers_and_event_ids_are_new_after_a_restart_and_the_epoch_is_not() -> None:
    scene = Scene(replicas=1)
    scene.publish()
    before = max(scene.replicas[0].seen)
    event, epoch = scene.ledger.events_since(0)[-1].event_id, scene.status().epoch
    scene.restart()
    assert scene.status().epoch == epoch
    scene.poll(1)
    scene.publish()
    assert all(each.seq > before for each in scene.replicas[0].ran[-4:])
    assert scene.replicas[0].version == 2
    assert scene.ledger.events_since(event)[0].name == "start"
