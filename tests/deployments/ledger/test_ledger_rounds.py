import pytest

from deployments.ledger.commit_phase import KEPT_TIMINGS, keep
from deployments.ledger.ledger import Ledger
from deployments.protocol.engine_state import InFlight
from deployments.protocol.errors import (
    Conflict,
    FleetUnavailable,
    InvalidRequest,
    RoundAborted,
    SlipstreamError,
)
from deployments.protocol.poll import Body, Check, Commit, CommitMode, Drop, KvCache, Outcome, Receive, Verify
from deployments.protocol.publishing import ReplicaTimings, RoundReport
from tests.deployments.ledger.ledger_scene import Scene, report_of

REJECTED, FAILED, DONE = Outcome.REJECTED, Outcome.REPLICA_FAILED, Outcome.DONE


@pytest.mark.parametrize("kind", [Receive, Verify])
@pytest.mark.parametrize(
    ("outcomes", "error", "fenced"),
    [
        ((DONE, DONE, DONE), None, ()),
        ((REJECTED, DONE, DONE), None, (0,)),
        ((FAILED, DONE, DONE), None, (0,)),
        ((FAILED, REJECTED, DONE), None, (0, 1)),
        ((REJECTED, REJECTED, REJECTED), InvalidRequest, ()),
        ((FAILED, REJECTED, REJECTED), InvalidRequest, (0,)),
        ((FAILED, FAILED, FAILED), RoundAborted, (0, 1, 2)),
    ],
)
def test_who_is_at_fault_decides_who_is_fenced(
    kind: type[Body],
    outcomes: tuple[Outcome, ...],
    error: type[SlipstreamError] | None,
    fenced: tuple[int, ...],
) -> None:
    scene = Scene(replicas=3)
    scene.connect()
    for replica, outcome in zip(scene.replicas, outcomes, strict=True):
        replica.outcomes[kind] = outcome
    raised: SlipstreamError | None = None
    try:
        round_id = scene.open()
        scene.send(round_id)
        scene.poll()
        task = scene.close(round_id)
        scene.poll(10)
        raised = task.error
    except SlipstreamError as caught:  # an earlier step ended the round: later calls say so too
        raised = caught
    assert (None if raised is None else type(raised)) is error
    assert tuple(i for i, each in enumerate(scene.replicas) if each.fenced is not None) == fenced
    expected = 0 if error else 1
    assert {each.version for each in scene.replicas if each.fenced is None} <= {expected}
    assert scene.status().round is None


def test_replicas_that_disagree_on_the_digest_lose_to_the_majority() -> None:
    scene = Scene(replicas=3)
    scene.replicas[0].digest, scene.replicas[0].compares = "bb", False
    report = report_of(scene.publish())
    assert scene.replicas[0].fenced == "verify: its digest bb differs from the others' aa"
    assert set(report.replicas) == {"r1", "r2"} and set(report.fenced) == {"r0"}
    assert report.digest == "aa" and Check.DIGESTS in report.checks, "what the majority found"


def test_a_tie_of_digests_aborts_and_fences_nobody() -> None:
    scene = Scene(replicas=2)
    scene.replicas[1].digest = "bb"
    task = scene.publish()
    assert isinstance(task.error, RoundAborted) and "no majority" in task.error.message
    assert all(each.admitted and each.version == 0 for each in scene.replicas)


def test_a_round_aborts_when_fewer_than_min_replicas_remain() -> None:
    scene = Scene(replicas=2, min_replicas=2)
    scene.replicas[0].outcomes[Verify] = FAILED
    task = scene.publish()
    assert isinstance(task.error, RoundAborted)
    assert "1 of 2 replicas remain, at least 2 must: r0: verify: replica_failed here" in task.error.message
    assert scene.replicas[1].version == 0 and "drop" in scene.replicas[1].names()


def test_together_holds_everybody_until_the_last_has_swapped() -> None:
    scene = Scene(replicas=2)
    slow = scene.replicas[1]
    slow.hangs_in.add(Commit)
    task = scene.publish()
    assert not task.done and scene.replicas[0].held and slow.version == 0
    slow.hangs_in.clear()
    scene.poll(4)
    assert report_of(task).phase == "committed" and not scene.replicas[0].held and not slow.held


def test_together_waits_until_a_fenced_replica_says_so_before_it_decides() -> None:
    scene = Scene(replicas=2)
    good, bad = scene.replicas
    bad.outcomes[Verify] = FAILED
    scene.connect()
    task = scene.close(scene.receive())
    scene.poll(1)  # both run VERIFY
    scene.ledger.on_report(good.report(), scene.now)
    scene.ledger.on_report(bad.report(), scene.now)  # fenced, and the directive is not sent yet
    for _ in range(2):  # the first directive that fences it is lost on the way
        scene.poll(3, only=[good])
        assert scene.ledger.state.committed_version == 0 and "commit" not in good.names()
        fence = scene.ledger.poll(bad.report(), scene.now)
    bad.take(fence)
    scene.poll(1, only=[bad])
    scene.poll(3, only=[good])
    assert report_of(task).version == 1 and good.version == 1


def test_rolling_takes_max_unavailable_at_a_time() -> None:
    scene = Scene(replicas=3, commit=CommitMode.ROLLING, max_unavailable=1)
    for replica in scene.replicas:
        replica.hangs_in.add(Commit)
    task = scene.publish()
    for turn, replica in enumerate(scene.replicas):
        pending = [each.pending for each in scene.status().members]
        assert [("commit",) if i == turn else () for i in range(3)] == pending
        replica.hangs_in.clear()
        scene.poll(2)
    assert report_of(task).phase == "committed"
    assert all("release" not in each.names() for each in scene.replicas)


def test_rolling_goes_past_a_replica_that_has_not_heard_of_its_fence() -> None:
    scene = Scene(replicas=3, commit=CommitMode.ROLLING, max_unavailable=1)
    first, fenced, last = scene.replicas
    first.hangs_in.add(Commit)
    task = scene.publish()
    fenced.failed = "its engine died"
    scene.ledger.poll(fenced.report(), scene.now)  # the answer is lost
    first.hangs_in.clear()
    scene.poll(3, only=[first, last])
    assert first.version == last.version == 1 and fenced.fenced is None
    scene.poll(2)
    assert report_of(task).fenced == {"r1": "its engine died"}


def test_rolling_decides_before_a_fenced_replica_says_so() -> None:
    scene = Scene(replicas=2, commit=CommitMode.ROLLING)
    good, bad = scene.replicas
    scene.connect()
    task = scene.close(scene.receive())
    bad.failed = "its engine died"
    scene.ledger.poll(bad.report(), scene.now)  # the answer is lost
    scene.poll(6, only=[good])
    assert report_of(task).version == good.version == 1 and bad.fenced is None


def test_no_round_opens_with_fewer_replicas_than_must_remain() -> None:
    scene = Scene(replicas=2, min_replicas=2)
    scene.connect()
    scene.replicas[1].failed = "its engine died"
    scene.poll()
    with pytest.raises(FleetUnavailable, match="a round needs at least 2 replicas, 1 are registered"):
        scene.open()


def test_a_replica_that_fails_after_the_decision_is_fenced_and_the_round_goes_on() -> None:
    scene = Scene(replicas=2)
    scene.replicas[0].outcomes[Commit] = FAILED
    report = report_of(scene.publish())
    assert report.phase == "committed" and report.fenced == {"r0": "commit: replica_failed here"}
    assert scene.replicas[0].fenced is not None and scene.replicas[1].version == 1


@pytest.mark.parametrize("call", ["abort", "release", "acquire"])
def test_a_decided_round_cannot_be_aborted(call: str) -> None:
    """Some replicas may have swapped: its publisher can neither abort it nor end it with its lease."""
    scene = Scene(replicas=2)
    for replica in scene.replicas:
        replica.hangs_in.add(Commit)
    task = scene.publish()
    if call == "abort":
        with pytest.raises(Conflict, match="is not open: round 1 is committing"):
            scene.ledger.abort_round(scene.token, 1, "changed my mind", scene.now)
    elif call == "release":
        scene.ledger.release(scene.token, scene.now)
    else:
        scene.ledger.acquire("trainer", scene.now)
    for replica in scene.replicas:
        replica.hangs_in.clear()
    scene.poll(6)
    assert report_of(task).phase == "committed"
    assert all(each.version == 1 and each.admitted for each in scene.replicas)


def test_a_replica_that_acknowledges_a_commit_but_holds_the_old_version_is_fenced() -> None:
    scene = Scene(replicas=2)
    liar = scene.replicas[0]
    scene.connect()
    task = scene.close(scene.receive())
    for _ in range(6):
        scene.poll(1)
        liar.version = 0
    assert report_of(task).fenced == {"r0": "commit: acknowledged version 1 but holds 0"}


@pytest.mark.parametrize("lost", [True, False])
def test_one_that_holds_the_old_version_holds_the_others_up_until_it_serves_no_more(lost: bool) -> None:
    """It acknowledged the commit, and fell before anyone looked at its answer."""
    scene = Scene(replicas=2)
    liar, other = scene.replicas
    other.hangs_in.add(Commit)
    scene.connect()
    task = scene.close(scene.receive())
    while not isinstance(liar.ran[-1].body, Commit):
        scene.poll(1)
    other.hangs_in.clear()
    liar.version = 0
    if lost:
        assert not scene.ledger.on_report(liar.report(), scene.now)
        scene.ledger.lost([(liar.replica_id, liar.incarnation)], "killed", scene.now)
    else:
        liar.failed = "its engine died"
        scene.ledger.poll(liar.report(), scene.now)  # the answer is lost
    scene.poll(4, only=[other])
    assert other.version == 1 and other.held != lost
    if not lost:
        scene.poll(4)
    assert not other.held and report_of(task).phase == "committed"


def test_what_is_left_of_an_aborted_round_does_not_end_the_next_one() -> None:
    scene = Scene(replicas=2)
    scene.connect()
    round_id = scene.open()
    one, other = scene.replicas
    one.outcomes[Receive] = other.outcomes[Receive] = Outcome.TRANSFER_FAILED
    scene.send(round_id)
    scene.poll(1, only=[other])
    late = scene.send(round_id)
    scene.poll(1, only=[one])
    for replica in scene.replicas:  # the first call is complete, and the second waits for one of them
        scene.ledger.on_report(replica.report(), scene.now)
    assert late.error is not None and scene.open() == round_id + 1
    scene.ledger.tick(scene.now)
    assert scene.status().round is not None


def test_what_an_aborted_round_has_not_delivered_reaches_no_replica() -> None:
    scene = Scene(replicas=2)
    scene.connect()
    round_id = scene.open()
    scene.send(round_id)
    scene.ledger.abort_round(scene.token, round_id, "changed my mind", scene.now)
    scene.poll()
    assert [each.names() for each in scene.replicas] == [["connect", "drop"]] * 2


def test_staging_of_another_round_is_dropped_while_one_is_open() -> None:
    scene = Scene(replicas=2)
    scene.connect()
    scene.replicas[0].staged_round = scene.open() + 7
    scene.poll()
    assert [each.names()[-1] for each in scene.replicas] == ["drop", "connect"]


def test_events_name_the_phases_of_a_round() -> None:
    scene = Scene(replicas=2, in_flight=InFlight.WAIT)
    scene.publish()
    scene.poll()
    phases = [each.fields["phase"] for each in scene.ledger.events_since(0) if each.name == "round"]
    assert phases == ["open", "verifying", "verified", "draining", "committing", "releasing", "committed"]


def test_payloads_in_flight_count_as_staging_until_the_last_and_no_longer_than_until_the_close() -> None:
    scene = Scene(replicas=1)
    scene.connect()
    round_id = scene.open()
    scene.send(round_id)
    scene.poll(1)
    scene.send(round_id)
    for elapsed_s in (1, 2):
        scene.now += elapsed_s
        scene.poll(1)
    scene.send(round_id)
    closed = scene.close(round_id)
    scene.poll(1)
    scene.ledger.on_report(scene.replicas[0].report(), scene.now)
    scene.now += 4
    scene.ledger.tick(scene.now)
    scene.poll(6)
    parts = report_of(closed).parts
    assert (parts["stage"], parts["verify"]) == (3, 4)


@pytest.mark.parametrize("kind", [Verify, Commit])
def test_an_acknowledgement_that_leaves_others_waiting_needs_no_look_at_all_members(
    kind: type[Body],
) -> None:
    scene = Scene(replicas=2)
    last = scene.replicas[-1]
    scene.connect()
    scene.close(scene.receive())
    while not isinstance(last.ran[-1].body, kind):
        scene.poll(1)
    assert not scene.ledger.on_report(last.report(), scene.now)


def test_a_report_has_the_figures_of_each_replica() -> None:
    report = report_of(Scene(replicas=2).publish())
    figures = ReplicaTimings(bytes=10, stage_s=0.5, verify_s=0.1, swap_s=0.01, gap_s=0.02)
    assert report.replicas == {"r0": figures, "r1": figures}


def test_a_report_says_when_and_by_whom_and_its_parts_add_up() -> None:
    scene = Scene(replicas=2)
    scene.ledger.state.wall = 1e9
    scene.connect(publisher="me")
    scene.now += 1
    round_id = scene.open()
    for before_send, receiving in ((2, 4), (8, 16)):
        scene.now += before_send
        call = scene.send(round_id)
        scene.now += receiving
        scene.poll()
        assert call.done
    scene.now += 32
    closed = scene.close(round_id)
    scene.now += 64
    scene.poll(1)  # they verify
    scene.poll(1, only=scene.replicas[:1])
    scene.poll(1, only=scene.replicas[1:])  # decided
    scene.now += 128
    scene.poll(10)
    report = report_of(closed)
    assert report.parts == {"open": 2, "send": 40, "stage": 20, "verify": 64, "drain": 0, "commit": 128}
    assert report.duration_s == sum(report.parts.values())
    assert (report.opened_at, report.committed_at) == (1e9 + 101, 1e9 + 101 + 126)
    assert report.publisher == "me"


def test_an_aborted_round_says_what_it_waited_for() -> None:
    scene = Scene(replicas=2)
    scene.connect()
    round_id = scene.open()
    scene.now += 3
    scene.ledger.abort_round(scene.token, round_id, "changed my mind", scene.now)
    report = scene.ledger.history()[-1]
    assert report.parts["open"] == report.duration_s == 3 and report.committed_at is None


@pytest.mark.parametrize("compares", [[True, True], [True], [True, False], [False]])
def test_a_rounds_checks_are_those_that_every_replica_has_made(compares: list[bool]) -> None:
    scene = Scene(replicas=len(compares))
    for replica, does in zip(scene.replicas, compares, strict=True):
        replica.compares = does
    checks = [Check.NAMES, Check.FINITE, Check.DIGESTS, Check.REPLICAS]
    absent = {Check.DIGESTS: not all(compares), Check.REPLICAS: len(compares) == 1}
    report = report_of(scene.publish())
    assert list(report.checks) == [check for check in checks if not absent.get(check)]


@pytest.mark.parametrize("kv_cache", KvCache)
@pytest.mark.parametrize("in_flight", InFlight)
def test_every_replica_is_told_what_its_publisher_chose(kv_cache: KvCache, in_flight: InFlight) -> None:
    scene = Scene(replicas=2)
    assert report_of(scene.publish(kv_cache=kv_cache, in_flight=in_flight)).phase == "committed"
    for replica in scene.replicas:
        told = [each.body for each in replica.ran if isinstance(each.body, Commit)]
        assert [(each.kv_cache, each.in_flight) for each in told] == [(kv_cache, in_flight)]


def test_a_replica_that_cannot_drop_what_came_is_fenced() -> None:
    """With `staging: none` its live weights are a mixture then."""
    scene = Scene(replicas=2)
    scene.connect()
    round_id = scene.open()
    scene.replicas[0].outcomes[Drop] = FAILED
    scene.ledger.abort_round(scene.token, round_id, "changed my mind", scene.now)
    scene.poll()
    assert scene.replicas[0].fenced == "drop: replica_failed here" and scene.replicas[1].admitted


@pytest.mark.parametrize("restarted", [False, True])
def test_a_version_is_not_undone_by_a_publisher_that_has_not_seen_it(restarted: bool) -> None:
    scene = Scene(replicas=1)
    for _ in range(2):
        report_of(scene.publish())
    if restarted:
        scene.restart()
        scene.poll()
    scene.connect()
    for older in (0, 1):
        with pytest.raises(
            Conflict,
            match=rf"version 2 is committed, and these weights continue from version {older}: nothing",
        ) as raised:
            scene.open(after=older)
        assert raised.value.detail == {"expected": older, "version": 2}
    assert scene.status().round is None
    report_of(scene.publish(after=2))
    assert report_of(scene.publish()).version == 4, "one that states no version may replace any"


# .


def report(round_id: int, replicas: int) -> RoundReport:
    return RoundReport(
        round_id=round_id,
        version=round_id,
        label=None,
        epoch=1,
        phase="committed",
        reason="",
        duration_s=1.0,
        replicas={f"r{number}": ReplicaTimings(swap_s=0.01) for number in range(replicas)},
        fenced={"lost": "out of contact"},
    )


def test_older_rounds_of_a_large_fleet_lose_their_timings_and_nothing_else() -> None:
    state = Ledger().state
    for round_id, replicas in enumerate((800, 800, 800, KEPT_TIMINGS + 1, 2), start=1):
        keep(state, report(round_id, replicas))
        assert len(state.history[-1].replicas) == replicas, "the newest is kept whole"
    assert [len(each.replicas) for each in state.history] == [0, 0, 0, 0, 2]
    assert all(each.fenced for each in state.history)
