from typing import Any

import pytest

from deployments.protocol.engine_state import IsPaused
from deployments.protocol.errors import Conflict, FleetUnavailable, InvalidRequest
from deployments.protocol.poll import Connect, Outcome, Receive
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.ledger.ledger_scene import Scene, condition, report_of


def test_each_replica_gets_its_own_rank_offset() -> None:
    scene = Scene(replicas=3, world_size=2)
    task = scene.connect({"rank_offset": 1, "world_size": 7, "port": 1234})
    assert task.done and task.error is None
    sent = [each.ran[0].body.init_info for each in scene.replicas if isinstance(each.ran[0].body, Connect)]
    assert len(sent) == 3
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


def test_a_list_payload_is_cut_by_worker() -> None:
    scene = Scene(replicas=2, world_size=2)
    scene.connect()
    round_id = scene.open()
    scene.send(round_id, ["a", "b", "c", "d"])
    scene.poll()
    received = [each.ran[-1].body for each in scene.replicas]
    assert [each.payload for each in received if isinstance(each, Receive)] == [["a", "b"], ["c", "d"]]
    with pytest.raises(InvalidRequest, match="one entry for each of 4 workers, got 3"):
        scene.send(round_id, ["a", "b", "c"])


def test_a_joiner_behind_the_fleet_is_not_admitted_until_the_store_has_its_version() -> None:
    scene = Scene(replicas=1)
    scene.publish(label="one")
    joiner = scene.start(version=0)
    scene.poll()
    assert not joiner.admitted
    scene.now += 1  # in which no round came
    scene.ledger.set_stored(1, "/store/v1", "one", scene.now)
    scene.poll()
    assert joiner.admitted and joiner.version == 1 and joiner.names() == ["connect", "catch_up"]


def test_a_joiner_never_starves_under_back_to_back_rounds() -> None:
    scene = Scene(replicas=1)
    scene.publish()
    joiner = scene.start(version=0)
    scene.close(scene.receive())
    scene.poll(6)
    assert joiner.admitted and joiner.version == 2


def test_a_replica_that_registers_during_a_round_waits_for_its_end() -> None:
    scene = Scene(replicas=1)
    scene.connect()
    round_id = scene.receive()
    late = scene.start()
    scene.poll()
    assert not late.admitted and "receive" not in late.names()
    scene.close(round_id)
    scene.poll(6)
    assert not late.admitted
    scene.now += 1  # in which no round came
    scene.ledger.set_stored(1, "/store/v1", None, scene.now)
    scene.poll()
    assert late.admitted and late.version == 1


def test_a_catch_up_that_loads_something_else_fences() -> None:
    scene = Scene(replicas=1)
    scene.publish()
    joiner = scene.start(version=0)
    scene.now += 1  # in which no round came
    scene.ledger.set_stored(1, "/store/v1", None, scene.now)
    scene.poll(1)
    joiner.version = 0
    scene.poll(2)
    assert joiner.fenced == "catch_up: loaded version 1 but holds 0"


def test_a_replica_that_serves_an_older_version_is_fenced() -> None:
    scene = Scene(replicas=2)
    scene.publish()
    scene.replicas[0].version = 0
    scene.poll(2)
    assert scene.replicas[0].fenced == "serves version 0, the fleet is at 1" and scene.replicas[1].admitted


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


def test_a_report_that_a_later_one_overtook_fences_nobody() -> None:
    """It says what was: an old version, acknowledgements of long ago."""
    scene = Scene(replicas=2)
    late = scene.replicas[0].report()
    report_of(scene.publish())
    with pytest.raises(FleetUnavailable, match="a later report of r0 overtook this one"):
        scene.ledger.poll(late, scene.now)
    again = scene.replicas[0].report()
    for _ in range(2):  # the answer to the first is lost
        scene.ledger.poll(again, scene.now)
    scene.poll()
    assert [each.admitted for each in scene.replicas] == [True, True]


@pytest.mark.parametrize(
    ("fields", "looks"),
    [
        ({}, False),
        ({"version": 7}, True),
        ({"failed": "its engine died"}, True),
        ({"ended": True}, True),
        ({"leaving": True}, True),
        ({"condition": condition(["pause keep"])}, True),
        ({"drains": {"round 1": None}}, True),
        ({"loading_version": 1}, True),
    ],
)
def test_a_report_that_says_something_new_is_looked_at_at_once(fields: dict[str, Any], looks: bool) -> None:
    scene = Scene(replicas=2)
    for name, value in fields.items():
        setattr(scene.replicas[0], name, value)
    assert scene.ledger.on_report(scene.replicas[0].report(), scene.now) is looks


def test_a_failure_is_looked_at_at_once_whatever_comes_with_it() -> None:
    scene = Scene(replicas=2)
    scene.connect()
    round_id = scene.open()
    scene.replicas[0].outcomes[Receive] = Outcome.REPLICA_FAILED
    scene.send(round_id)
    scene.ledger.call(IsPaused(), scene.now)
    scene.poll(1)
    assert scene.ledger.on_report(scene.replicas[0].report(), scene.now)


def test_a_fenced_replica_is_told_at_once_and_takes_no_instruction() -> None:
    scene = Scene(replicas=1)
    replica = scene.replicas[0]
    replica.failed, replica.staged_round = "its engine died", 9
    scene.ledger.poll(replica.report(), scene.now)  # the answer is lost
    assert scene.status().members[0].pending == ()
    assert scene.ledger.has_updates(replica.report())
    scene.poll(1)
    assert replica.fenced is not None


def test_a_replica_that_the_ledger_does_not_know_is_answered_at_once() -> None:
    stranger = FakeReplica(replica_id="r0", incarnation="r0-1")
    assert Scene().ledger.has_updates(stranger.report())


def test_a_fenced_replica_that_does_not_end_counts_as_silent() -> None:
    scene = Scene(replicas=1, heartbeat_timeout_s=10)
    scene.replicas[0].failed = "its engine died"
    scene.poll(2)
    silent = []
    for _ in range(12):
        scene.now += 1
        scene.poll(1)
        silent += scene.ledger.tick(scene.now)
    assert silent == ["r0"] and scene.status().members == ()


def test_a_joiner_loads_no_version_but_the_committed_one() -> None:
    scene = Scene(replicas=1)
    for _ in range(2):
        report_of(scene.publish())
    joiner = scene.start()
    scene.wait(3)  # the store has none
    scene.ledger.set_stored(1, "/store/v1", None, scene.now)
    scene.wait(3)
    assert joiner.names() == ["connect"]


def test_a_joiner_that_was_not_told_yet_receives_the_round_and_loads_nothing() -> None:
    scene = Scene(replicas=1)
    report_of(scene.publish())
    joiner = scene.start()
    scene.poll()
    scene.now += 1
    scene.ledger.set_stored(1, "/store/v1", None, scene.now)
    assert scene.status().members[1].pending == ("catch_up",)
    round_id = scene.open()
    assert scene.status().members[1].pending == ()
    scene.send(round_id)
    scene.poll()
    scene.close(round_id)
    scene.poll(6)
    assert joiner.admitted and joiner.version == 2 and "catch_up" not in joiner.names()


def test_a_joiner_that_leaves_loads_nothing() -> None:
    scene = Scene(replicas=1)
    report_of(scene.publish())
    joiner = scene.start(leaving=True)
    scene.now += 1
    scene.ledger.set_stored(1, "/store/v1", None, scene.now)
    scene.wait(3)
    assert "catch_up" not in joiner.names()


def test_events_name_who_comes_and_goes() -> None:
    scene = Scene(replicas=3)
    left, fenced, lost = scene.replicas
    left.leaving = left.drained = True
    scene.poll(2)
    left.ended = True
    fenced.failed = "its engine died"
    scene.poll(1)
    scene.ledger.lost([(lost.replica_id, lost.incarnation)], "killed", scene.now)
    events = [(each.name, each.fields["replica"]) for each in scene.ledger.events_since(0)[1:]]
    joined = [(name, f"r{number}") for number in range(3) for name in ("register", "admit")]
    assert events == [*joined, ("leaving", "r0"), ("left", "r0"), ("fence", "r1"), ("lost", "r2")]
