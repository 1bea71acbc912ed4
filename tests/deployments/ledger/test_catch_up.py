import pytest

from deployments.protocol.poll import CatchUp, Outcome
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.ledger.ledger_scene import Scene, report_of


def stored_round(scene: Scene) -> None:
    version = report_of(scene.publish()).version
    scene.ledger.set_stored(version, f"/store/v{version}", None, scene.now)


def loading(scene: Scene) -> FakeReplica:
    """A joiner that has begun to load the committed version."""
    stored_round(scene)
    joiner = FakeReplica(replica_id="late", incarnation="late-1", hangs_in={CatchUp})
    scene.replicas.append(joiner)
    scene.wait(3)
    assert joiner.loading_version == scene.ledger.state.committed_version
    return joiner


def test_rounds_go_on_while_a_joiner_loads() -> None:
    scene = Scene(replicas=2)
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
    scene = Scene(replicas=1)
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
    scene = Scene(replicas=1)
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
    scene = Scene(replicas=1, stage_timeout_s=10, catch_up_timeout_s=100, grace_s=1)
    joiner = loading(scene)
    scene.wait(90)
    assert joiner.fenced is None
    scene.wait(12)
    scene.poll(1)
    assert joiner.fenced == "missed the deadline of catch_up (100 s)"


def test_what_an_earlier_controller_told_it_to_load_stops_no_round_either() -> None:
    scene = Scene(replicas=1)
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
    scene = Scene(replicas=1)
    stored_round(scene)
    joiner = FakeReplica(replica_id="late", incarnation="late-1", hangs_in={CatchUp})
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
            joiner.hangs_in.add(CatchUp)
            began = None
        if second % every_s == 0:
            stored_round(scene)
        if joiner.admitted:
            break
    assert joiner.admitted, "it never converged"
    assert second - phase_s <= 3 * every_s + 3 * load_s + 5
    assert joiner.outcomes == {} and joiner.fenced is None


def test_one_that_fails_while_it_loads_is_fenced() -> None:
    scene = Scene(replicas=1)
    stored_round(scene)
    joiner = scene.start(version=0, outcomes={CatchUp: Outcome.REPLICA_FAILED})
    scene.wait(3)
    assert joiner.fenced == "catch_up: replica_failed here"
