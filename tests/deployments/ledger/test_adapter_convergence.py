import pytest

from deployments.protocol.adapters import LoadAdapter, SetAdapters
from deployments.protocol.errors import Conflict
from deployments.protocol.poll import CommitMode, Outcome, Verify
from tests.deployments.ledger.adapter_scene import AdapterScene, ended, held, live, names
from tests.deployments.ledger.compacted import compact
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.ledger.ledger_scene import report_of


def test_a_joiner_has_all_live_adapters_before_it_serves() -> None:
    scene = AdapterScene(1)
    scene.load("math")
    scene.load("code")
    joiner = scene.start()
    while not joiner.admitted:
        scene.poll(1)
    assert live(joiner) == ["math@1", "code@1"]


def test_a_joiner_that_cannot_load_a_live_adapter_never_serves() -> None:
    scene = AdapterScene(1)
    scene.load("math")
    scene.replicas.append(FakeReplica(replica_id="r1", incarnation="r1-1"))
    scene.replicas[1].outcomes[LoadAdapter] = Outcome.REJECTED
    scene.poll(6)
    assert scene.replicas[1].fenced is not None and not scene.replicas[1].admitted


def test_a_joiner_admitted_in_the_middle_of_a_load_is_asked_as_well() -> None:
    scene = AdapterScene(1)
    scene.replicas[0].hangs_in = {LoadAdapter}
    call = scene.load("math")
    joiner = scene.start()
    scene.poll(4)
    assert joiner.admitted and held(joiner) == ["math@1"] and live(joiner) == []
    scene.replicas[0].hangs_in = set()
    scene.poll(6)
    assert ended(call) and live(joiner) == ["math@1"]


# -- a restart of the controller ---------------------------------------------------------------


def test_after_a_restart_behind_the_decision_the_adapter_is_live_everywhere() -> None:
    scene = AdapterScene(2)
    scene.replicas[1].hangs_in = {SetAdapters}
    call = scene.load("math")
    assert not call.done and live(scene.replicas[0]) == ["math@1"]
    scene.restart()
    scene.replicas[1].hangs_in = set()
    scene.poll(6)
    assert [live(each) for each in scene.replicas] == [["math@1"], ["math@1"]]


def test_after_a_restart_files_stay_until_all_replicas_have_reported() -> None:
    scene = AdapterScene(2)
    scene.load("math")
    running = scene.replicas[1].adapters.begin("math")
    scene.unload("math")
    scene.restart()
    scene.poll(3, only=scene.replicas[:1])
    assert running in scene.ledger.adapter_ids()
    scene.poll(3)
    assert running in scene.ledger.adapter_ids()
    scene.replicas[1].adapters.end(running)
    scene.poll(3)
    assert scene.ledger.adapter_ids() == set()


def test_an_unload_waits_for_a_replica_that_an_earlier_controller_told_to_make_it_live() -> None:
    scene = AdapterScene(2)
    late = scene.replicas[1]
    late.hangs_in = {SetAdapters}
    scene.load("math")
    directive = scene.ledger.poll(late.report(), scene.now)
    assert [type(each.body) for each in directive.instructions] == [SetAdapters]
    late.hangs_in = set()
    scene.restart()
    scene.poll(3, only=scene.replicas[:1])
    scene.ledger.poll(late.report(), scene.now)  # it still works on something else
    call = scene.ledger.unload_adapter("math", scene.now)
    scene.ledger.tick(scene.now)
    scene.poll(3, only=scene.replicas[:1])
    assert not call.done
    late.take(directive)
    scene.poll(6)
    assert call.done and live(late) == []


def test_an_unload_waits_for_a_replica_that_has_not_heard_of_its_fence() -> None:
    scene = AdapterScene(3)
    scene.load("math")
    unheard = scene.replicas[2]
    unheard.outcomes[SetAdapters] = Outcome.REPLICA_FAILED
    call = scene.unload("math", polls=0)
    unheard.take(scene.ledger.poll(unheard.report(), scene.now))
    scene.ledger.poll(unheard.report(), scene.now)  # the answer, with the fence, is lost
    scene.poll(6, only=scene.replicas[:2])
    assert scene.state_of(unheard) == "fenced" and unheard.admitted and not call.done
    scene.poll(3)
    assert unheard.fenced is not None and ended(call) is None


@pytest.mark.slow
def test_hundreds_of_adapters_leave_nothing_behind() -> None:
    scene = AdapterScene(2)
    for step in range(300):
        ended(scene.load(f"run-v{step}", polls=4))
        if step >= 3:
            scene.unload(f"run-v{step - 3}", polls=3)
    assert names(scene) == ["run-v297@2", "run-v298@2", "run-v299@2"]
    assert [len(each.adapters.held) for each in scene.replicas] == [3, 3]
    kinds = [each.kind for each in compact(scene.journal)]
    assert kinds.count("cataloged") == 1


# -- beside rounds and sleep -------------------------------------------------------------------


@pytest.mark.parametrize("commit", [CommitMode.TOGETHER, CommitMode.ROLLING])
def test_a_slow_load_holds_no_replica_up_that_waits_for_the_others_commit(commit: CommitMode) -> None:
    scene = AdapterScene(2)
    scene.replicas[1].hangs_in = {Verify}
    scene.connect()
    round_id = scene.receive(commit=commit)
    call = scene.close(round_id)
    scene.poll(2)
    assert not call.done
    load = scene.load("math")
    scene.replicas[1].hangs_in = {LoadAdapter}
    scene.poll(10)
    assert (call.done, load.done) == (commit is CommitMode.TOGETHER, False)
    scene.replicas[1].hangs_in = set()
    scene.poll(10)
    assert report_of(call).version == 1 and ended(load)


@pytest.mark.parametrize("commit", [CommitMode.TOGETHER, CommitMode.ROLLING])
@pytest.mark.parametrize("moment", ["opened", "received", "closed", "decided"])
def test_an_unload_in_the_middle_of_a_round_disturbs_neither(moment: str, commit: CommitMode) -> None:
    scene = AdapterScene(2)
    ended(scene.load("math"))
    scene.connect()
    round_id = scene.open(commit=commit)
    unload = scene.unload("math") if moment == "opened" else None
    scene.send(round_id)
    scene.poll()
    unload = scene.unload("math") if moment == "received" else unload
    call = scene.close(round_id)
    if moment == "decided":
        scene.poll(1)
    unload = unload or scene.unload("math", polls=0)
    scene.poll(10)
    assert report_of(call).version == 1 and unload.done and unload.error is None
    assert [(held(each), each.version) for each in scene.replicas] == [([], 1)] * 2
    assert names(scene) == []


def test_while_the_weights_sleep_nothing_is_loaded() -> None:
    scene = AdapterScene(1)
    scene.call("sleep 1")
    with pytest.raises(Conflict, match="sleep"):
        scene.load("math")
