"""The ledger's rules, one by one. A virtual clock; replicas that answer at once, or as they are told."""

from typing import Any

import pytest

from deployments.errors import (
    Conflict,
    FleetUnavailable,
    InvalidRequest,
    RoundAborted,
    SlipstreamError,
    StalePublisher,
)
from deployments.weights.decisions import Committed, Decision, Finished
from deployments.weights.ledger import Ledger
from deployments.weights.ledger_config import LedgerConfig
from deployments.weights.members import Task
from deployments.weights.protocol import (
    CommitMode,
    FleetOperation,
    InstructionKind,
    Manifest,
    Outcome,
    RoundOptions,
    RoundReport,
    TensorSpec,
)
from tests.deployments.weights.fake_replica import FakeReplica


class Scene:
    """A ledger, its replicas, a clock and a disk."""

    def __init__(self, replicas: int = 0, world_size: int = 1, **config: Any) -> None:
        self.config = LedgerConfig(**config)
        self.now = 100.0
        self.journal: list[Decision] = []
        self.ledger = Ledger(self.config)
        self.ledger.recover([], self.now)
        self.replicas: list[FakeReplica] = []
        self.token = 0
        for _ in range(replicas):
            self.start(world_size=world_size)

    def start(self, **fields: Any) -> FakeReplica:
        name = f"r{len(self.replicas)}"
        replica = FakeReplica(replica_id=name, incarnation=f"{name}-1", **fields)
        self.replicas.append(replica)
        self.poll(1)
        return replica

    def poll(self, times: int = 3, *, only: list[FakeReplica] | None = None) -> None:
        for _ in range(times):
            for replica in self.replicas if only is None else only:
                directive = self.ledger.poll(replica.report(), self.now)
                self.journal += self.ledger.take_decisions()
                replica.take(directive)

    def wait(self, elapsed_s: float, *, poll: bool = True) -> None:
        """Let time pass second by second, with replicas that poll."""
        for _ in range(int(elapsed_s)):
            self.now += 1.0
            if poll:
                self.poll(1)
            self.ledger.tick(self.now)

    def connect(self, init_info: dict[str, Any] | None = None) -> Task:
        self.token = self.ledger.acquire("trainer", self.now).token
        task = self.ledger.connect(self.token, {} if init_info is None else init_info, self.now)
        self.poll()
        return task

    def open(self, **options: Any) -> int:
        task = self.ledger.open_round(self.token, None, RoundOptions(**options), self.now)
        self.poll()
        return int(task.result)

    def send(self, round_id: int, payload: Any = None) -> Task:
        return self.ledger.send(self.token, round_id, {} if payload is None else payload, self.now)

    def close(self, round_id: int) -> Task:
        return self.ledger.close_round(self.token, round_id, None, None, self.now)

    def publish(self, **options: Any) -> Task:
        self.connect()
        task = self.close(self.open(**options))
        self.poll(8)
        return task

    def restart(self) -> None:
        self.journal += self.ledger.take_decisions()
        self.ledger = Ledger(self.config)
        self.ledger.recover(self.journal, self.now)
        self.journal += self.ledger.take_decisions()

    def state_of(self, replica: FakeReplica) -> str:
        members = self.ledger.status(self.now)["members"]
        return next((str(e["state"]) for e in members if e["replica_id"] == replica.replica_id), "gone")


def report_of(task: Task) -> RoundReport:
    assert task.done and task.error is None, task.error
    report: RoundReport = task.result
    return report


# -- verification ---------------------------------------------------------------------------------

REJECTED, FAILED, DONE = Outcome.REJECTED, Outcome.FAILED, Outcome.DONE


@pytest.mark.parametrize("kind", [InstructionKind.BEGIN, InstructionKind.RECEIVE, InstructionKind.VERIFY])
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
    kind: InstructionKind,
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
        scene.poll(6)
        raised = task.error
    except SlipstreamError as caught:  # an earlier step ended the round: later calls say so too
        raised = caught
    assert (None if raised is None else type(raised)) is error
    assert tuple(i for i, each in enumerate(scene.replicas) if each.fenced is not None) == fenced
    expected = 0 if error else 1
    assert {each.version for each in scene.replicas if each.fenced is None} <= {expected}
    assert scene.ledger.status(scene.now)["round"] is None


def test_replicas_that_disagree_on_the_digest_lose_to_the_majority() -> None:
    scene = Scene(replicas=3)
    scene.replicas[1].digest = "bb"
    report = report_of(scene.publish())
    assert scene.replicas[1].fenced == "verify: its digest bb differs from the others' aa"
    assert set(report.replicas) == {"r0", "r2"} and set(report.fenced) == {"r1"}


def test_a_tie_of_digests_aborts_and_fences_nobody() -> None:
    scene = Scene(replicas=2)
    scene.replicas[1].digest = "bb"
    task = scene.publish()
    assert isinstance(task.error, RoundAborted) and "no majority" in task.error.message
    assert all(each.admitted and each.version == 0 for each in scene.replicas)


def test_a_round_aborts_when_fewer_than_min_replicas_remain() -> None:
    scene = Scene(replicas=2, min_replicas=2)
    scene.replicas[0].outcomes[InstructionKind.VERIFY] = FAILED
    task = scene.publish()
    assert isinstance(task.error, RoundAborted)
    assert "1 of 2 replicas remain, at least 2 must: r0: verify: failed here" in task.error.message
    assert scene.replicas[1].version == 0 and "drop" in scene.replicas[1].kinds()


# -- commit ---------------------------------------------------------------------------------------


def test_together_holds_everybody_until_the_last_has_swapped() -> None:
    scene = Scene(replicas=2)
    slow = scene.replicas[1]
    slow.mute.add(InstructionKind.COMMIT)
    task = scene.publish()
    assert not task.done and scene.replicas[0].held and slow.version == 0
    slow.mute.clear()
    scene.poll(4)
    assert report_of(task).phase == "committed" and not scene.replicas[0].held and not slow.held


def test_together_waits_for_a_fence_to_be_heard_before_it_decides() -> None:
    scene = Scene(replicas=2)
    good, bad = scene.replicas
    bad.outcomes[InstructionKind.VERIFY] = FAILED
    scene.connect()
    task = scene.close(scene.open())
    scene.poll(1)  # both run VERIFY
    scene.ledger.hear(good.report(), scene.now)
    scene.ledger.hear(bad.report(), scene.now)  # fenced, and not told: the answer is still on its way
    scene.poll(3, only=[good])
    assert scene.ledger.committed_version == 0 and "commit" not in good.kinds()
    scene.poll(1, only=[bad])
    scene.poll(3, only=[good])
    assert report_of(task).version == 1 and good.version == 1


def test_rolling_takes_max_unavailable_at_a_time() -> None:
    scene = Scene(replicas=3, commit=CommitMode.ROLLING, max_unavailable=1)
    for replica in scene.replicas:
        replica.mute.add(InstructionKind.COMMIT)
    task = scene.publish()
    for turn, replica in enumerate(scene.replicas):
        pending = [each["pending"] for each in scene.ledger.status(scene.now)["members"]]
        assert [["commit"] if i == turn else [] for i in range(3)] == pending
        replica.mute.clear()
        scene.poll(2)
    assert report_of(task).phase == "committed"
    assert all("release" not in each.kinds() for each in scene.replicas)


def test_a_replica_that_fails_after_the_decision_is_fenced_and_the_round_goes_on() -> None:
    scene = Scene(replicas=2)
    scene.replicas[0].outcomes[InstructionKind.COMMIT] = FAILED
    report = report_of(scene.publish())
    assert report.phase == "committed" and report.fenced == {"r0": "commit: failed here"}
    assert scene.replicas[0].fenced is not None and scene.replicas[1].version == 1


def test_a_replica_that_acknowledges_a_commit_but_holds_the_old_version_is_fenced() -> None:
    scene = Scene(replicas=2)
    liar = scene.replicas[0]
    scene.connect()
    task = scene.close(scene.open())
    for _ in range(6):
        scene.poll(1)
        liar.version = 0
    assert report_of(task).fenced == {"r0": "commit: acknowledged version 1 but holds 0"}


# -- deadlines, heartbeats, leases ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "limit_s"),
    [
        (InstructionKind.BEGIN, 20),
        (InstructionKind.VERIFY, 20),
        (InstructionKind.COMMIT, 10),
        (InstructionKind.RELEASE, 10),
    ],
)
def test_a_missed_deadline_fences(kind: InstructionKind, limit_s: int) -> None:
    scene = Scene(replicas=2, stage_timeout_s=20, commit_timeout_s=10, grace_s=2)
    scene.replicas[0].mute.add(kind)
    task = scene.publish()
    scene.wait(limit_s + 1)
    assert scene.replicas[0].fenced is None, "the grace period has not passed"
    scene.wait(3)
    assert scene.replicas[0].fenced == f"missed the deadline of {kind} ({limit_s} s)"
    scene.poll(6)
    assert report_of(task).phase == "committed" and scene.replicas[1].admitted


def test_a_silent_member_is_lost_and_fenced_if_it_comes_back() -> None:
    scene = Scene(replicas=2, heartbeat_timeout_s=10)
    silent, other = scene.replicas
    epoch = scene.ledger.status(scene.now)["epoch"]
    for _ in range(12):
        scene.now += 1
        scene.poll(1, only=[other])
        scene.ledger.tick(scene.now)
    assert scene.state_of(silent) == "gone"
    assert scene.ledger.status(scene.now)["epoch"] == epoch + 1
    scene.poll(1)
    assert silent.fenced is not None and "silent" in silent.fenced and not silent.admitted


def test_an_expired_lease_aborts_its_open_round_and_frees_the_fleet() -> None:
    scene = Scene(replicas=1, lease_s=30)
    scene.connect()
    round_id = scene.open()
    with pytest.raises(Conflict, match=r"'trainer' publishes; its lease ends in 30\.0 s"):
        scene.ledger.acquire("other", scene.now)
    scene.wait(31)
    with pytest.raises(StalePublisher):
        scene.ledger.send(scene.token, round_id, {}, scene.now)
    assert scene.ledger.history()[-1].reason == f"round {round_id} aborted: the lease of 'trainer' expired"
    assert scene.ledger.acquire("other", scene.now).token > scene.token


def test_the_lease_does_not_run_out_while_its_publisher_waits_for_the_close() -> None:
    scene = Scene(replicas=1, lease_s=5, stage_timeout_s=60)
    scene.replicas[0].mute.add(InstructionKind.VERIFY)
    task = scene.publish()
    scene.wait(30)
    scene.replicas[0].mute.clear()
    scene.poll(6)
    assert report_of(task).phase == "committed"


def test_a_publisher_that_comes_again_gets_a_new_token_and_its_old_round_is_gone() -> None:
    scene = Scene(replicas=1)
    scene.connect()
    round_id, old = scene.open(), scene.token
    new = scene.ledger.acquire("trainer", scene.now).token
    assert new > old
    with pytest.raises(StalePublisher):
        scene.ledger.renew(old, scene.now)
    with pytest.raises(RoundAborted, match="took a new lease"):
        scene.ledger.send(new, round_id, {}, scene.now)


# -- connections ----------------------------------------------------------------------------------


def test_each_replica_gets_its_own_rank_offset() -> None:
    scene = Scene(replicas=3, world_size=2)
    task = scene.connect({"rank_offset": 1, "world_size": 7, "port": 1234})
    assert task.done and task.error is None
    sent = [each.ran[0].args["init_info"] for each in scene.replicas]
    assert [info["rank_offset"] for info in sent] == [1, 3, 5]
    assert all(info["port"] == 1234 and info["world_size"] == 7 for info in sent)


def test_a_group_of_the_wrong_size_is_refused_with_the_numbers() -> None:
    scene = Scene(replicas=2, world_size=2)
    with pytest.raises(
        InvalidRequest, match=r"expected 5 \(rank_offset 1 \+ 4 workers of 2 replicas\), got 3"
    ):
        scene.connect({"rank_offset": 1, "world_size": 3})


def test_a_collective_asks_for_a_new_connection_when_the_membership_changed() -> None:
    scene = Scene(replicas=1)
    scene.connect({"rank_offset": 1})
    scene.start()
    with pytest.raises(Conflict, match="connect again") as caught:
        scene.open()
    assert caught.value.detail["connect_again"] is True
    scene.connect({"rank_offset": 1})
    scene.open()


def test_a_joiner_is_connected_by_itself_when_the_transport_is_no_collective() -> None:
    scene = Scene(replicas=1)
    scene.connect({"segment": "x"})
    joiner = scene.start()
    scene.poll()
    assert joiner.kinds() == ["connect"]
    assert report_of(scene.publish()).replicas.keys() == {"r0", "r1"}


def test_a_connection_that_fails_everywhere_fences_nobody() -> None:
    scene = Scene(replicas=2)
    for replica in scene.replicas:
        replica.outcomes[InstructionKind.CONNECT] = FAILED
    task = scene.connect()
    assert isinstance(task.error, InvalidRequest)
    assert all(each.admitted for each in scene.replicas)


def test_a_list_payload_is_cut_by_worker() -> None:
    scene = Scene(replicas=2, world_size=2)
    scene.connect()
    round_id = scene.open()
    scene.send(round_id, ["a", "b", "c", "d"])
    scene.poll()
    assert [each.ran[-1].args["payload"] for each in scene.replicas] == [["a", "b"], ["c", "d"]]
    with pytest.raises(InvalidRequest, match="one entry for each of 4 workers, got 3"):
        scene.send(round_id, ["a", "b", "c"])


def test_tensors_that_differ_from_those_announced_are_named() -> None:
    scene = Scene(replicas=1)
    scene.connect()
    announced = Manifest(tensors={"w": TensorSpec(dtype="float32", shape=(2,))})
    closed = Manifest(tensors={"w": TensorSpec(dtype="bfloat16", shape=(2,), digest="x")})
    task = scene.ledger.open_round(scene.token, announced, RoundOptions(), scene.now)
    with pytest.raises(InvalidRequest, match=r"w: announced float32\[2\], closed with bfloat16\[2\]"):
        scene.ledger.close_round(scene.token, task.result, closed, None, scene.now)


# -- joiners --------------------------------------------------------------------------------------


def test_a_joiner_behind_the_fleet_is_not_admitted_until_the_store_has_its_version() -> None:
    scene = Scene(replicas=1)
    scene.publish(label="one")
    joiner = scene.start(version=0)
    scene.poll()
    assert not joiner.admitted
    scene.ledger.set_stored(1, "/store/v1", "one", scene.now)
    scene.poll()
    assert joiner.admitted and joiner.version == 1 and joiner.kinds() == ["connect", "catch_up"]


def test_a_joiner_never_starves_under_back_to_back_rounds() -> None:
    scene = Scene(replicas=1)
    scene.publish()
    joiner = scene.start(version=0)
    scene.close(scene.open())
    scene.poll(6)
    assert joiner.admitted and joiner.version == 2


def test_a_replica_that_registers_during_a_round_waits_for_its_end() -> None:
    scene = Scene(replicas=1)
    scene.connect()
    round_id = scene.open()
    late = scene.start()
    scene.poll()
    assert not late.admitted and "begin" not in late.kinds()
    scene.close(round_id)
    scene.poll(6)
    assert not late.admitted
    scene.ledger.set_stored(1, "/store/v1", None, scene.now)
    scene.poll()
    assert late.admitted and late.version == 1


def test_a_catch_up_that_loads_something_else_fences() -> None:
    scene = Scene(replicas=1)
    scene.publish()
    joiner = scene.start(version=0)
    scene.ledger.set_stored(1, "/store/v1", None, scene.now)
    scene.poll(1)
    joiner.version = 0
    scene.poll(2)
    assert joiner.fenced == "catch_up: loaded version 1 but holds 0"


def test_a_version_that_the_fleet_never_had_is_fenced() -> None:
    scene = Scene(replicas=1)
    stranger = scene.start(version=7)
    assert stranger.fenced == "holds version 7, the fleet never went past 0"


def test_a_new_incarnation_takes_the_place_of_the_old_one() -> None:
    scene = Scene(replicas=1)
    old = scene.replicas[0]
    scene.replicas[0] = FakeReplica(replica_id="r0", incarnation="r0-2")
    scene.poll(1)
    assert scene.replicas[0].admitted
    scene.poll(1, only=[old])
    assert old.fenced is not None and not old.admitted


# -- order of calls -------------------------------------------------------------------------------


def test_calls_out_of_order_say_what_is_open() -> None:
    scene = Scene()
    scene.token = scene.ledger.acquire("trainer", scene.now).token
    with pytest.raises(FleetUnavailable):
        scene.ledger.connect(scene.token, {}, scene.now)
    scene.start()
    scene.connect()
    round_id = scene.open()
    with pytest.raises(Conflict, match="round 1 is open: close or abort it"):
        scene.open()
    with pytest.raises(Conflict, match="cannot connect while round 1 is open"):
        scene.ledger.connect(scene.token, {}, scene.now)
    scene.close(round_id)
    with pytest.raises(Conflict, match="round 1 is verifying, expected open"):
        scene.send(round_id)
    scene.poll(6)
    with pytest.raises(Conflict, match="no round is open; the fleet is at version 1"):
        scene.ledger.abort_round(scene.token, round_id, "too late", scene.now)


def test_a_rejected_call_is_the_callers_fault_and_fences_nobody() -> None:
    scene = Scene(replicas=2)
    scene.replicas[0].outcomes[InstructionKind.CALL] = REJECTED
    task = scene.ledger.call(FleetOperation.SLEEP, {"level": 9}, scene.now)
    scene.poll()
    assert isinstance(task.error, InvalidRequest) and "r0: rejected here" in task.error.message
    assert all(each.admitted for each in scene.replicas)


# -- restarts -------------------------------------------------------------------------------------


def test_an_undecided_round_is_gone_after_a_restart_and_its_staging_is_dropped() -> None:
    scene = Scene(replicas=1)
    scene.replicas[0].mute.add(InstructionKind.COMMIT)
    scene.connect()
    round_id = scene.open()
    scene.close(round_id)
    scene.poll(1)  # verified here; the acknowledgement is not heard any more
    scene.restart()
    scene.poll()
    assert scene.ledger.committed_version == 0
    assert "drop" in scene.replicas[0].kinds() and scene.replicas[0].admitted
    assert scene.ledger.status(scene.now)["round"] is None


@pytest.mark.parametrize("commit", list(CommitMode))
@pytest.mark.parametrize("swapped", [0, 1, 2])
def test_a_decided_round_is_finished_after_a_restart(commit: CommitMode, swapped: int) -> None:
    scene = Scene(replicas=2, commit=commit, max_unavailable=2)
    for replica in scene.replicas[swapped:]:
        replica.mute.add(InstructionKind.COMMIT)
    scene.publish()
    scene.restart()
    for replica in scene.replicas:
        replica.mute.clear()
    scene.poll(6)
    assert [each.version for each in scene.replicas] == [1, 1]
    assert all(each.admitted and not each.held for each in scene.replicas)
    assert [type(each) for each in scene.journal if isinstance(each, Committed | Finished)] == [
        Committed,
        Finished,
    ]


def test_a_participant_that_never_returns_does_not_hold_a_resumed_round_for_ever() -> None:
    scene = Scene(replicas=2, heartbeat_timeout_s=10)
    for replica in scene.replicas:
        replica.mute.add(InstructionKind.COMMIT)
    scene.publish()
    scene.restart()
    gone = scene.replicas.pop()
    scene.replicas[0].mute.clear()
    scene.poll()
    assert scene.replicas[0].held
    scene.wait(12)
    scene.poll()
    assert not scene.replicas[0].held and scene.replicas[0].version == 1
    assert set(scene.ledger.history()[-1].fenced) == {gone.replica_id}


def test_no_round_opens_after_a_restart_before_all_who_served_are_heard_of() -> None:
    scene = Scene(replicas=2)
    scene.restart()
    scene.poll(1, only=scene.replicas[:1])
    scene.token = scene.ledger.acquire("trainer", scene.now).token
    scene.ledger.connect(scene.token, {}, scene.now)
    scene.poll(2, only=scene.replicas[:1])
    with pytest.raises(FleetUnavailable, match=r"has not heard of \['r1'\] yet"):
        scene.ledger.open_round(scene.token, None, RoundOptions(), scene.now)
    scene.poll(1)
    scene.ledger.open_round(scene.token, None, RoundOptions(), scene.now)


def test_a_fence_and_the_tokens_outlive_a_restart() -> None:
    scene = Scene(replicas=2)
    scene.replicas[0].outcomes[InstructionKind.VERIFY] = FAILED
    scene.publish()
    token = scene.token
    scene.restart()
    revenant = FakeReplica(replica_id="r0", incarnation="r0-1", version=1)
    scene.poll(1, only=[revenant])
    assert revenant.fenced == "verify: failed here" and not revenant.admitted
    assert scene.ledger.acquire("trainer", scene.now).token == token + 1


def test_sequence_numbers_and_event_ids_are_new_after_a_restart() -> None:
    scene = Scene(replicas=1)
    scene.publish()
    before = max(scene.replicas[0].seen)
    event = scene.ledger.events_since(0)[-1]["id"]
    scene.restart()
    scene.poll(1)
    scene.publish()
    assert all(each.seq > before for each in scene.replicas[0].ran[-4:])
    assert scene.replicas[0].version == 2
    assert scene.ledger.events_since(event)[0]["event"] == "start"
