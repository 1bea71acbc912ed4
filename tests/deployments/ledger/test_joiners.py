"""What a joiner loads, and when it serves."""

import pytest

from deployments.ledger.decisions import Founded, decode, encode
from deployments.ledger.stored_versions import RETRY_S
from deployments.protocol import poll
from deployments.protocol.routing import ReplicaEndpoint
from tests.deployments.ledger.compacted import compact
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.ledger.ledger_scene import StoreScene, report_of

# -- what it is told to load first ------------------------------------------------------------------


def test_a_joiner_loads_the_stored_version_and_serves_after_the_next_round() -> None:
    scene = StoreScene(replicas=1)
    scene.round()
    answer = scene.begin()
    for _ in range(20):  # its engine starts for long
        scene.round()
        scene.now += 1.4
    assert answer.version == 1 and scene.begin("other").version == 21
    late = scene.up(answer)
    scene.round()
    assert late.admitted and late.version == 22


def of_joiner(scene: StoreScene) -> poll.StoredVersion:
    stored = scene.begin().stored
    assert stored is not None
    return stored


def test_a_joiner_is_told_whose_version_it_loads_and_with_which_digest() -> None:
    scene = StoreScene(replicas=2)
    scene.round()
    expected = poll.StoredVersion(version=1, path="/store/v1", fleet_id="fleet", digest="aa")
    assert of_joiner(scene) == expected
    scene.restart()
    assert of_joiner(scene) == expected, "the digest is in the journal"
    late = scene.start(version=0)
    scene.wait(2)
    (told,) = [each.body for each in late.ran if isinstance(each.body, poll.CatchUp)]
    assert told.stored == expected


def test_a_digest_of_live_parameters_says_nothing_about_a_checkpoint() -> None:
    scene = StoreScene(replicas=0)
    scene.start(compares=False, updates_in_place=True)
    scene.round()
    assert of_joiner(scene).digest is None


def test_a_digest_of_what_arrived_is_that_of_the_checkpoint_although_nobody_stated_it() -> None:
    """vLLM's own wire, staged: tensors are hashed where they arrive."""
    scene = StoreScene(replicas=0)
    scene.start(compares=False)
    scene.round()
    assert of_joiner(scene).digest == "aa"
    scene.restart()
    assert of_joiner(scene).digest == "aa"
    assert [check.value for check in scene.ledger.history()[-1].checks] == ["names", "finite"]


# -- while rounds go on -----------------------------------------------------------------------------


def loading(scene: StoreScene) -> FakeReplica:
    """A joiner that has begun to load the committed version."""
    scene.round()
    joiner = FakeReplica(replica_id="late", incarnation="late-1", hangs_in={poll.CatchUp})
    scene.replicas.append(joiner)
    scene.wait(3)
    assert joiner.loading_version == scene.ledger.state.committed_version
    return joiner


def test_rounds_go_on_while_a_joiner_loads() -> None:
    scene = StoreScene(replicas=2)
    joiner = loading(scene)
    for _ in range(3):
        assert report_of(scene.publish()).replicas.keys() == {"r0", "r1"}
    assert "receive" not in joiner.names() and scene.status().workers == 2
    joiner.hangs_in.clear()
    scene.poll(2)
    assert not joiner.admitted and scene.status().workers == 3
    assert report_of(scene.publish()).replicas.keys() == {"r0", "r1", "late"}
    assert joiner.admitted and joiner.version == 5


def test_the_connection_reaches_it_when_it_has_loaded() -> None:
    scene = StoreScene(replicas=1)
    joiner = loading(scene)
    scene.connect({"segment": "new"})
    round_id = scene.receive()
    joiner.hangs_in.clear()
    scene.poll()
    assert joiner.names() == ["connect", "catch_up", "connect"]
    scene.poll(only=[joiner])
    scene.close(round_id)
    scene.poll(6)
    round_id = scene.receive()
    scene.close(round_id)
    scene.poll(6)
    assert joiner.admitted and joiner.version == 3


def test_a_round_waits_for_those_that_load_if_nobody_else_is_there() -> None:
    scene = StoreScene(replicas=1)
    joiner = loading(scene)
    gone = scene.replicas.pop(0)
    scene.ledger.lost([(gone.replica_id, gone.incarnation)], "killed", scene.now)
    scene.connect()
    round_id = scene.open()
    scene.send(round_id)
    task = scene.close(round_id)
    scene.poll(6)
    assert not task.done
    joiner.hangs_in.clear()
    scene.poll(8)
    assert report_of(task).version == 2 and joiner.admitted


def test_loading_has_a_deadline_of_its_own() -> None:
    scene = StoreScene(replicas=1, stage_timeout_s=10, catch_up_timeout_s=100, grace_s=1)
    joiner = loading(scene)
    scene.wait(90)
    assert joiner.fenced is None
    scene.wait(12)
    scene.poll(1)
    assert joiner.fenced == "missed the deadline of catch_up (100 s)"


def test_what_an_earlier_controller_told_it_to_load_stops_no_round_either() -> None:
    scene = StoreScene(replicas=1)
    joiner = loading(scene)
    scene.restart()
    scene.poll()
    assert report_of(scene.publish()).replicas.keys() == {"r0"}
    scene.wait(5)
    assert joiner.names() == ["connect"], "it loads already"
    joiner.hangs_in.clear()
    scene.poll(1)
    joiner.loading_version, joiner.version = None, 1
    scene.poll(1)
    assert report_of(scene.publish()).replicas.keys() == {"r0", "late"} and joiner.admitted


@pytest.mark.parametrize("every_s", [1, 7, 40])
@pytest.mark.parametrize("load_s", [3, 90])
def test_a_joiner_converges_whatever_the_rate_of_rounds(every_s: int, load_s: int) -> None:
    """Rounds begin every `every_s`; the joiner, whose loads take `load_s`, comes after the first one."""
    phase_s = 3
    scene = StoreScene(replicas=1)
    scene.round()
    joiner = FakeReplica(replica_id="late", incarnation="late-1", hangs_in={poll.CatchUp})
    began: int | None = None
    for second in range(400):
        if second == phase_s:
            scene.replicas.append(joiner)
        if joiner.loading_version is not None:
            began = second if began is None else began
            if second - began >= load_s:
                joiner.hangs_in.clear()
        scene.wait(1)
        if joiner.loading_version is None and not joiner.hangs_in:
            joiner.hangs_in.add(poll.CatchUp)
            began = None
        if second % every_s == 0:
            scene.round()
        if joiner.admitted:
            break
    assert joiner.admitted, "it never converged"
    assert second - phase_s <= 3 * every_s + 3 * load_s + 5
    assert joiner.outcomes == {} and joiner.fenced is None


def test_one_that_fails_while_it_loads_is_fenced() -> None:
    scene = StoreScene(replicas=1)
    scene.round()
    joiner = scene.start(version=0, outcomes={poll.CatchUp: poll.Outcome.REPLICA_FAILED})
    scene.wait(3)
    assert joiner.fenced == "catch_up: replica_failed here"


# -- versions that it cannot load -------------------------------------------------------------------


def test_a_version_that_cannot_be_loaded_is_not_named_again_and_the_next_round_helps() -> None:
    scene = StoreScene(replicas=1)
    scene.round()
    assert (of_joiner(scene).version, of_joiner(scene).path) == (1, "/store/v1")
    refused = poll.Unloadable(version=1, reason="version 1 must be in /store/v1, and there is none")
    answer = scene.begin(unloadable=refused)
    assert answer == poll.JoinAnswer()
    assert scene.begin("other").version == 1, "its own disk may be the reason"
    late = scene.up(answer)
    scene.wait(5)
    assert late.fenced is None and not late.admitted and "catch_up" not in late.names()
    assert scene.status().store_problem == (
        "late cannot load version 1 from the store: version 1 must be in /store/v1, and there is none"
    )
    scene.round()
    assert late.admitted and late.version == 2 and scene.status().store_problem is None


def test_a_member_that_cannot_read_what_it_is_to_load_is_intact_and_waits_for_the_next_round() -> None:
    scene = StoreScene(replicas=1)
    scene.publish()
    late = scene.up(poll.JoinAnswer())
    late.outcomes[poll.CatchUp] = poll.Outcome.REJECTED
    scene.store(1)
    scene.wait(5)
    assert late.fenced is None and late.names().count("catch_up") == 1
    assert scene.status().store_problem == "late cannot load version 1 from the store: rejected here"
    scene.round()
    assert late.admitted and late.version == 2


def test_a_refusal_lapses() -> None:
    scene = StoreScene(replicas=1)
    scene.round()
    scene.begin(unloadable=poll.Unloadable(version=1, reason="damaged"))
    scene.wait(RETRY_S - 1)
    assert scene.status().store_problem is not None
    scene.wait(2)
    assert scene.status().store_problem is None and scene.begin().version == 1


# -- a fleet whose hosts have a store of their own each (`store.shared: false`) ---------------------


OWN, SHARED = {"shared_store": False}, {"shared_store": True}


def host_stores(**config: bool) -> StoreScene:
    scene = StoreScene(2, **config)
    for replica in scene.replicas:
        replica.endpoint = ReplicaEndpoint(address=f"{replica.replica_id}:1", key="k")
    scene.round()
    return scene


def bodies_of(replica: FakeReplica, kind: type) -> list[object]:
    return [each.body for each in replica.ran if isinstance(each.body, kind)]


def test_every_commit_is_kept_on_each_host_whoever_published_it() -> None:
    for config, kept in ((OWN, True), (SHARED, False)):
        scene = host_stores(**config)
        for replica in scene.replicas:
            (commit,), (received, *_) = bodies_of(replica, poll.Commit), bodies_of(replica, poll.Receive)
            assert isinstance(commit, poll.Commit) and isinstance(received, poll.Receive)
            fleet_id = scene.ledger.state.fleet_id
            own = poll.WriteVersion(version=1, label=None, fleet_id=fleet_id, digest="aa")
            assert commit.keep == (own if kept else None), config
            assert received.retain_version == (1 if kept else None), config


def test_a_joiner_is_told_who_may_have_its_version() -> None:
    for config in (OWN, SHARED):
        scene = host_stores(**config)
        one, other = scene.replicas
        holders = (one.endpoint, other.endpoint) if config is OWN else ()
        scene.start()  # it has no address yet
        assert of_joiner(scene).holders == holders
        told = scene.ledger.stored_version(1, "/its/v1")
        assert (told.path, told.digest, told.holders) == ("/its/v1", "aa", holders), "a trainer, too"
        scene.replicas.remove(other)
        scene.ledger.lost([(other.replica_id, other.incarnation)], "killed", scene.now)
        assert of_joiner(scene).holders == holders[:1]


def test_one_that_found_no_holder_asks_again_though_no_round_comes() -> None:
    """All of a fleet start at once: the host of the first one that serves may be the only one that has it."""
    for config in (OWN, SHARED):
        scene = host_stores(**config)
        unloadable = poll.Unloadable(version=1, reason="no replica gave version 1")
        assert scene.begin().version == 1
        answer = scene.begin(unloadable=unloadable)
        assert answer == poll.JoinAnswer()
        late = scene.up(answer)
        scene.wait(RETRY_S - 5)
        assert not late.admitted and not bodies_of(late, poll.CatchUp), config
        late.outcomes[poll.CatchUp] = poll.Outcome.REJECTED
        scene.wait(10)
        scene.wait(RETRY_S - 15)
        assert len(bodies_of(late, poll.CatchUp)) == 1 and late.fenced is None
        late.outcomes.clear()
        scene.wait(20)
        assert late.admitted


# -- version 0 --------------------------------------------------------------------------------------


ONE, OTHER = poll.InitialWeights(digest="1" * 32), poll.InitialWeights(digest="2" * 32)
BOTH = f"loaded digest {'2' * 32} as version 0, which is digest {'1' * 32}"


def test_a_joiner_with_other_weights_is_refused_with_both_digests() -> None:
    scene = StoreScene(replicas=0)
    first = scene.start(initial=ONE)
    assert scene.begin() == poll.JoinAnswer(initial=ONE, served=True)
    same, other, unknown = (scene.start(initial=each) for each in (ONE, OTHER, None))
    scene.poll()
    assert first.admitted and same.admitted
    assert not other.admitted and other.fenced is not None and BOTH in other.fenced
    assert not unknown.admitted and unknown.fenced is not None


def test_of_two_that_start_together_one_is_refused() -> None:
    scene = StoreScene(replicas=0)
    pair = [
        FakeReplica(replica_id=name, incarnation=name, initial=each)
        for name, each in (("a", ONE), ("b", OTHER))
    ]
    for each in pair:
        scene.ledger.on_report(each.report(), scene.now)
    scene.replicas += pair
    scene.poll()
    assert [each.admitted for each in pair] == [True, False]


@pytest.mark.parametrize("twice", [False, True], ids=["restart", "compacted"])
def test_it_outlives_the_controller(twice: bool) -> None:
    scene = StoreScene(replicas=0)
    scene.start(initial=ONE)
    scene.poll()
    if twice:
        scene.restart()
        scene.journal = compact(scene.journal)
    scene.restart()
    assert scene.status().initial == ONE and scene.begin().served, "one that has not polled yet counts"
    scene.poll()
    other = scene.start(initial=OTHER)
    scene.poll()
    assert not other.admitted and other.fenced is not None and BOTH in other.fenced


def test_a_fleet_from_before_learns_it_from_the_first_that_is_admitted() -> None:
    scene = StoreScene(replicas=0)
    scene.ledger.take_decisions()
    scene.journal = [decode('{"kind": "founded", "fleet_id": "old", "model": "m"}')]
    scene.restart()
    assert scene.begin() == poll.JoinAnswer()
    scene.start(initial=ONE)
    scene.poll()
    assert scene.status().initial == ONE
    founded = [each for each in scene.journal if isinstance(each, Founded)][-1]
    assert founded == decode(encode(founded)) == Founded(fleet_id="old", model="m", initial=ONE)


def test_it_does_not_matter_to_replicas_once_a_round_has_replaced_it() -> None:
    scene = StoreScene(replicas=0)
    scene.start(initial=ONE)
    scene.poll()
    scene.publish()
    assert scene.status().initial == ONE, "a trainer may still have it as base or reference"
    assert scene.begin() == poll.JoinAnswer()
    late = scene.start(initial=OTHER)
    scene.publish()
    assert late.admitted and late.version == 2


def test_one_that_refuses_to_load_is_the_reason_why_replicas_are_missing_while_it_asks() -> None:
    scene = StoreScene(replicas=0)
    scene.start(initial=ONE)
    scene.poll()
    found = poll.Unloadable(version=0, reason="expected digest 1, got digest 2")
    for _ in range(3):  # it asks again every second
        assert scene.begin(unloadable=found) == poll.JoinAnswer(initial=ONE, served=True)
    events = [each.name for each in scene.ledger.events_since(0)]
    assert (events.count("refused"), events.count("join")) == (1, 0)
    assert scene.status().size.problem == "late is refused: expected digest 1, got digest 2"
    assert scene.status().store_problem is None
    scene.wait(RETRY_S + 1)
    assert scene.status().size.problem is None


def test_another_model_founds_it_anew() -> None:
    scene = StoreScene(replicas=0)
    assert scene.ledger.serve("a") is None
    scene.start(initial=ONE)
    scene.poll()
    scene.restart()
    assert scene.ledger.serve("a") is None and scene.status().initial == ONE
    assert scene.ledger.serve("b") is None and scene.status().initial is None


def test_whether_others_serve_it_is_told() -> None:
    scene = StoreScene(replicas=0)
    first = scene.start(initial=ONE)
    scene.poll()
    scene.ledger.lost([(first.replica_id, first.incarnation)], "its process is gone", scene.now)
    assert scene.begin() == poll.JoinAnswer(initial=ONE)


def test_one_that_a_round_brings_to_the_fleets_version_does_not_say_what_version_0_is() -> None:
    scene = StoreScene(replicas=0)
    scene.start(initial=ONE)
    scene.round()
    other = scene.start(initial=OTHER)
    scene.round()
    assert other.admitted and other.version == 2 and scene.status().initial == ONE
