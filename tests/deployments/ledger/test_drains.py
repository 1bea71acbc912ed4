from typing import Any

import pytest

from deployments.ledger.decisions import EngineStateChanged
from deployments.protocol.engine_state import InFlight
from deployments.protocol.errors import Conflict, RoundAborted
from deployments.protocol.poll import Commit, CommitMode, Drain, Receive
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.ledger.ledger_scene import Scene, operations, report_of

LONGER_S = 200  # than every deadline of the default settings


def busy_fleet(replicas: int = 2, **config: Any) -> Scene:
    scene = Scene(
        replicas=replicas, **({"in_flight": InFlight.WAIT, "drain_timeout_s": 100, "lease_s": 1000} | config)
    )
    for replica in scene.replicas:
        replica.take_requests(2)
    return scene


def drain_events(scene: Scene) -> list[dict[str, Any]]:
    return [dict(e.fields) for e in scene.ledger.events_since(0) if e.name == "drain_expired"]


def goes_on(scene: Scene) -> bool:
    """Every replica serves, computes, and drains for nobody."""
    return all(each.admitted and not each.held and not each.drains for each in scene.replicas)


@pytest.mark.parametrize("native", [False, True])
def test_a_round_that_waits_is_decided_when_no_request_runs(native: bool) -> None:
    scene = busy_fleet()
    for replica in scene.replicas:
        replica.updates_in_place = native
    call = None if native else scene.publish()
    if native:
        scene.connect()
        sent = scene.send(scene.open())
        scene.poll()
        assert not sent.done and not any(Receive in map(type, bodies(each)) for each in scene.replicas)
    scene.replicas[0].end_requests()
    for replica in scene.replicas:
        replica.take_requests(3)  # they wait in vLLM's queue
    scene.wait(50)
    assert scene.ledger.state.committed_version == 0 and scene.replicas[1].running == 2
    assert [each.draining for each in scene.status().members] == [True, True]
    assert [each.running for each in scene.status().members] == [0, 2]
    scene.replicas[1].end_requests()
    if native:
        scene.poll()
        assert sent.done and sent.error is None
        call = scene.close(1)
    scene.poll(8)
    assert call is not None
    report = report_of(call)
    assert report.not_drained == {} and {each.version for each in scene.replicas} == {1}
    scene.poll()
    assert goes_on(scene)
    assert [each.running for each in scene.replicas] == [3, 3], "requests that waited are begun"


@pytest.mark.parametrize("native", [False, True])
def test_a_round_does_not_wait_for_ever(native: bool) -> None:
    scene = busy_fleet()
    for replica in scene.replicas:
        replica.updates_in_place = native
    scene.replicas[0].end_requests()
    scene.connect()
    round_id = scene.open()
    call = scene.send(round_id)
    if not native:
        scene.poll()
        call = scene.close(round_id)
    scene.wait(LONGER_S)
    scene.poll()
    assert goes_on(scene), "nobody is fenced for it"
    assert scene.replicas[1].running == 2, "its requests were not aborted"
    assert drain_events(scene) == [
        {"what": "round 1", "running": {"r1": 2}, "timeout_s": 100, "then": "abort"}
    ]
    assert scene.ledger.history()[-1].not_drained == {"r1": 2}
    assert isinstance(call.error, RoundAborted) and call.error.status == 409
    assert "requests still ran after drain_timeout_s = 100 s (r1: 2)" in call.error.message
    assert {each.version for each in scene.replicas} == {0} and not scene.ledger.state.pending
    assert scene.publish(in_flight=InFlight.KEEP).error is None


def test_with_rolling_each_replica_is_drained_in_its_turn() -> None:
    scene = busy_fleet(3, commit=CommitMode.ROLLING)
    call = scene.publish()
    scene.wait(20)
    assert [bool(each.drains) for each in scene.replicas] == [True, False, False], "one at a time"
    scene.replicas[0].end_requests()
    scene.poll(4)
    assert [each.version for each in scene.replicas] == [1, 0, 0] and scene.replicas[1].drains
    scene.wait(LONGER_S)
    scene.replicas[2].end_requests()
    scene.poll(8)
    report = report_of(call)
    assert report.not_drained == {"r1": 2}, "after the decision the rest is kept"
    scene.poll()
    assert goes_on(scene) and {each.version for each in scene.replicas} == {1}
    modes = [body.in_flight for each in scene.replicas for body in bodies(each) if isinstance(body, Commit)]
    assert modes == [InFlight.WAIT, InFlight.KEEP, InFlight.WAIT]


@pytest.mark.parametrize("min_replicas", [1, 2])
def test_a_replica_that_is_lost_while_it_drains_is_not_waited_for(min_replicas: int) -> None:
    scene = busy_fleet(min_replicas=min_replicas)
    scene.replicas[0].end_requests()
    call = scene.publish()
    lost = scene.replicas.pop()
    scene.ledger.lost([(lost.replica_id, lost.incarnation)], "killed", scene.now)
    scene.poll(8)
    assert call.done and (call.error is None) == (min_replicas == 1)
    scene.poll()
    assert goes_on(scene) and scene.replicas[0].version == (1 if min_replicas == 1 else 0)


def test_a_drain_ends_with_the_controller_that_asked_for_it() -> None:
    scene = busy_fleet()
    scene.publish()
    scene.ask("pause wait")
    scene.poll(1)
    assert all(len(each.drains) == 2 for each in scene.replicas)
    scene.restart()
    scene.poll(4)
    assert goes_on(scene) and scene.ledger.state.committed_version == 0
    assert not any(isinstance(each, EngineStateChanged) for each in scene.journal)


@pytest.mark.parametrize("text", ["pause wait", "sleep 1 wait", "sleep 0 wait"])
def test_an_operation_waits_until_no_request_runs(text: str) -> None:
    scene = busy_fleet()
    call = scene.ask(text)
    scene.wait(50)
    assert not call.done and scene.status().condition == () and not operations(scene.replicas[0])
    for replica in scene.replicas:
        replica.end_requests()
        replica.take_requests(1)
    scene.poll(6)
    assert call.done and call.error is None
    assert scene.status().condition == (text.split()[0],) and not scene.ledger.state.drains
    assert [(each.running, each.waiting, len(each.drains)) for each in scene.replicas] == [(0, 1, 0)] * 2


@pytest.mark.parametrize("text", ["pause wait", "sleep 1 wait"])
def test_an_operation_that_waits_too_long_changes_nothing(text: str) -> None:
    scene = busy_fleet()
    scene.replicas[0].end_requests()
    call = scene.ask(text)
    scene.wait(LONGER_S)
    assert isinstance(call.error, Conflict) and call.error.status == 409
    assert "requests still ran after drain_timeout_s = 100 s (r1: 2)" in call.error.message
    assert call.error.detail["running"] == {"r1": 2}
    assert goes_on(scene) and scene.status().condition == ()
    assert not any(isinstance(each, EngineStateChanged) for each in scene.journal)
    assert drain_events(scene)[0]["then"] == "nothing changes"
    assert scene.call("pause keep").error is None


def test_an_engine_that_does_not_say_what_runs_is_not_fenced_for_it() -> None:
    scene = busy_fleet()
    scene.replicas[0].end_requests()
    scene.replicas[1].hangs_in.add(Drain)
    scene.replicas[1].take_requests(1)
    call = scene.ask("pause wait")
    scene.wait(50)
    scene.replicas[1].hangs_in.clear()
    scene.poll()
    assert scene.replicas[1].drains and not call.done
    scene.wait(LONGER_S)
    assert isinstance(call.error, Conflict) and goes_on(scene)


@pytest.mark.parametrize("drains", [False, True])
def test_an_engine_that_never_says_what_runs_is_named(drains: bool) -> None:
    scene = busy_fleet(drain_timeout_s=30)
    scene.replicas[0].end_requests()
    silent = scene.replicas[1]
    if drains:
        silent.running = None  # type: ignore[assignment]
    else:
        silent.hangs_in.add(Drain)
    call = scene.ask("pause wait")
    scene.wait(29)
    scene.now += 2
    scene.ledger.tick(scene.now)
    assert call.error is not None and "(r1: did not say how many)" in call.error.message


def test_a_drain_that_gave_way_before_it_was_delivered_reaches_no_replica() -> None:
    scene = busy_fleet()
    scene.ask("pause wait")
    scene.call("resume")
    assert not any(isinstance(body, Drain) for each in scene.replicas for body in bodies(each))


def test_one_that_drains_for_a_round_has_not_drained_for_an_operation() -> None:
    scene = busy_fleet()
    scene.replicas[0].end_requests()
    scene.publish()
    call = scene.ask("pause wait")
    scene.replicas[0].hangs_in.add(Drain)
    scene.replicas[1].end_requests()
    scene.poll(1)
    assert not call.done and len(scene.ledger.state.drains[-1].call.waiting) == 2


def test_an_operation_waits_on_when_a_round_beside_it_is_aborted() -> None:
    scene = busy_fleet()
    scene.publish()
    call = scene.ask("pause wait")
    scene.poll(1)
    scene.ledger.abort_round(scene.token, 1, "changed its mind", scene.now)
    for replica in scene.replicas:
        replica.end_requests()
    scene.poll(6)
    assert call.done and call.error is None and scene.status().condition == ("pause",)


def test_two_operations_that_wait_are_both_carried_out() -> None:
    scene = busy_fleet()
    calls = [scene.ask("pause wait"), scene.ask("sleep 0 wait")]
    scene.poll()
    for replica in scene.replicas:
        replica.end_requests()
    scene.poll(6)
    assert all(call.done and call.error is None for call in calls)
    assert scene.status().condition == ("pause", "sleep")


@pytest.mark.parametrize("text", ["resume", "pause abort", "sleep 1"])
def test_an_operation_that_does_not_wait_ends_one_that_does(text: str) -> None:
    scene = busy_fleet()
    waits = scene.ask("pause wait")
    scene.poll(1)
    call = scene.call(text)
    assert isinstance(waits.error, Conflict) and "gave way to a later" in waits.error.message
    assert call.done and call.error is None
    assert not any(each.drains for each in scene.replicas)
    assert not scene.ledger.state.drains and not scene.ledger.state.pending
    assert scene.status().condition == (() if text == "resume" else (text.split()[0],))


def test_an_operation_that_only_reads_ends_nothing() -> None:
    scene = busy_fleet()
    waits = scene.ask("pause wait")
    assert scene.call("is_paused").error is None and not waits.done


def test_an_operation_and_a_round_wait_side_by_side() -> None:
    scene = busy_fleet()
    call = scene.ask("pause wait")
    update = scene.publish()
    for replica in scene.replicas:
        replica.end_requests()
    scene.poll(10)
    assert call.error is None and report_of(update).version == 1
    assert scene.status().condition == ("pause",)
    assert all(not each.drains and not each.held for each in scene.replicas)


def test_a_standstill_of_the_controller_is_not_counted() -> None:
    scene = busy_fleet()
    call = scene.ask("pause wait")
    scene.wait(60)
    scene.now += 60
    scene.ledger.credit(60, scene.now)
    scene.ledger.tick(scene.now)
    assert not call.done
    scene.wait(50)
    assert call.done


def bodies(replica: FakeReplica) -> list[object]:
    return [each.body for each in replica.ran]
