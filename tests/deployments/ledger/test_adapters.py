import pytest

from deployments.ledger.adapter_loads import REMEMBERED, next_adapter, numbered
from deployments.protocol.adapters import (
    Adapter,
    AdapterCatalog,
    AdapterTimings,
    LoadAdapter,
    LoadedAdapter,
    LoadRequest,
    SetAdapters,
)
from deployments.protocol.errors import Conflict, FleetUnavailable, InvalidRequest, NotFound
from deployments.protocol.ledger_config import AdapterLimits
from deployments.protocol.poll import CommitMode, Outcome, Verify
from tests.deployments.ledger.compacted import compact
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.ledger.ledger_scene import FILES, AdapterScene, ended, held, live, names, report_of


def test_an_adapter_is_live_on_all_replicas_when_its_load_is_answered() -> None:
    scene = AdapterScene(2)
    call = scene.load("math")
    assert ended(call).full_name == "math@1"  # type: ignore[attr-defined]
    assert [live(each) for each in scene.replicas] == [["math@1"], ["math@1"]]
    assert scene.ledger.adapters()[0].replicas == ("r0", "r1")
    assert [each.names() for each in scene.replicas] == [["load_adapter", "set_adapters"]] * 2


def test_no_request_may_name_it_before_all_replicas_hold_it() -> None:
    scene = AdapterScene(2)
    scene.replicas[1].hangs_in = {LoadAdapter}
    call = scene.load("math")
    assert not call.done
    assert held(scene.replicas[0]) == ["math@1"]
    assert live(scene.replicas[0]) == []
    scene.replicas[1].hangs_in = set()
    scene.poll(8)
    assert ended(call) and live(scene.replicas[0]) == ["math@1"]


def test_a_load_that_expects_another_version_changes_nothing() -> None:
    scene = AdapterScene(2)
    for after, newest in ((1, 0), (0, 1), (2, 1)):
        if newest and not names(scene):
            ended(scene.load("math"))
        with pytest.raises(Conflict, match=f"is at version {newest}, expected {after}"):
            scene.begin("math", in_place=True, after=after)
    assert names(scene) == ["math@1"] and names(scene, "loading") == []
    assert scene.begin("math", in_place=True, after=1).version == 2


def test_a_load_says_where_its_time_went() -> None:
    scene = AdapterScene(2)
    ledger = scene.ledger
    adapter = scene.begin("math")
    assert ledger.adapters()[0].timings == AdapterTimings()
    scene.now += 1.0
    call = ledger.stage_adapter(adapter, FILES, scene.now)
    scene.replicas[1].hangs_in = {LoadAdapter}
    scene.wait(2)
    ledger.complete_adapter(adapter, scene.now)
    scene.replicas[1].hangs_in = set()
    scene.wait(6)
    assert ended(call)
    timings = ledger.adapters()[0].timings
    assert timings is not None and (timings.copy_s, timings.sync_s, timings.load_s) == (1.0, 2.0, 4.0)
    assert timings.total_s is not None and timings.total_s > 5.0
    assert timings.replicas == dict.fromkeys(("r0", "r1"), LoadedAdapter(read_s=0.25, add_s=0.125))
    scene.restart()
    scene.poll(4)
    assert ledger is not scene.ledger and scene.ledger.adapters()[0].timings is None


def test_what_one_replica_rejects_no_replica_keeps() -> None:
    scene = AdapterScene(2)
    scene.replicas[1].outcomes[LoadAdapter] = Outcome.REJECTED
    call = scene.load("math")
    assert isinstance(call.error, Conflict) and "r1" in call.error.message
    assert [held(each) for each in scene.replicas] == [[], []]
    assert names(scene) == [] and scene.ledger.adapter_ids() == set()
    assert [scene.state_of(each) for each in scene.replicas] == ["serving", "serving"]


def test_what_all_replicas_reject_is_the_callers_fault() -> None:
    scene = AdapterScene(2)
    for replica in scene.replicas:
        replica.outcomes[LoadAdapter] = Outcome.REJECTED
    call = scene.load("math")
    assert type(call.error) is InvalidRequest and "rejected here" in call.error.message


def test_a_replica_that_hangs_is_fenced_and_the_others_go_on() -> None:
    scene = AdapterScene(2)
    scene.replicas[1].hangs_in = {LoadAdapter}
    call = scene.load("math")
    scene.wait(scene.config.call_timeout_s + scene.config.grace_s + 2)
    scene.poll(2)
    assert ended(call)
    assert scene.state_of(scene.replicas[1]) in ("fenced", "gone")
    assert live(scene.replicas[0]) == ["math@1"]


def test_a_replica_that_fails_in_a_load_is_fenced_and_the_others_serve_the_adapter() -> None:
    scene = AdapterScene(2)
    scene.replicas[1].outcomes[LoadAdapter] = Outcome.REPLICA_FAILED
    call = scene.load("math")
    assert ended(call) and live(scene.replicas[0]) == ["math@1"]
    assert scene.replicas[1].fenced == "load_adapter: replica_failed here"


def test_a_replica_that_says_it_has_loaded_an_adapter_and_does_not_hold_it_is_fenced() -> None:
    scene = AdapterScene(2)
    forgetful = scene.replicas[1]
    forgetful.adapters.held = Forgetful()
    assert ended(scene.load("math")) and live(scene.replicas[0]) == ["math@1"]
    assert forgetful.fenced == "load_adapter: done, and it does not hold it"


class Forgetful(dict[int, Adapter]):
    def __setitem__(self, key: int, value: Adapter) -> None: ...


def test_a_load_that_failed_is_answered_when_no_replica_has_the_adapter_any_more() -> None:
    scene = AdapterScene(2)
    scene.replicas[0].hangs_in = {SetAdapters}
    scene.replicas[1].outcomes[LoadAdapter] = Outcome.REJECTED
    call = scene.load("math")
    assert held(scene.replicas[0]) == ["math@1"] and not call.done
    scene.replicas[0].hangs_in = set()
    scene.poll(6)
    assert isinstance(call.error, Conflict) and held(scene.replicas[0]) == []


def test_with_too_few_replicas_left_the_load_fails() -> None:
    scene = AdapterScene(2, min_replicas=2)
    scene.replicas[1].hangs_in = {LoadAdapter}
    call = scene.load("math")
    dead = scene.replicas.pop()
    scene.ledger.lost([(dead.replica_id, dead.incarnation)], "gone", scene.now)
    scene.poll(4)
    assert isinstance(call.error, FleetUnavailable)
    assert held(scene.replicas[0]) == []


def test_a_new_version_answers_new_requests_and_the_old_one_those_that_run() -> None:
    scene = AdapterScene(2)
    scene.limits = AdapterLimits(keep=1)
    scene.restart()
    scene.poll(2)
    scene.load("math")
    running = scene.replicas[0].adapters.begin("math")
    scene.load("math", in_place=True)
    assert names(scene) == ["math@2"] and names(scene, "retired") == ["math@1"]
    assert held(scene.replicas[0]) == ["math@1", "math@2"] and held(scene.replicas[1]) == ["math@2"]
    assert running in scene.ledger.adapter_ids()  # its files stay: the engine may read them again
    scene.replicas[0].adapters.end(running)
    scene.poll(2)
    assert held(scene.replicas[0]) == ["math@2"] and names(scene, "retired") == []
    assert scene.ledger.adapter_ids() == {2}


@pytest.mark.parametrize("keep", range(1, 8))
def test_no_version_retires_before_there_are_more_than_may_stay(keep: int) -> None:
    scene = AdapterScene(1)
    scene.limits = AdapterLimits(keep=keep)
    scene.restart()
    scene.poll(2)
    for newest in range(1, 13):
        ended(scene.load("math", in_place=True))
        expected = [f"math@{version}" for version in range(max(1, newest + 1 - keep), newest + 1)]
        assert names(scene) == expected == live(scene.replicas[0])


def test_unloading_a_name_unloads_all_its_versions_everywhere() -> None:
    scene = AdapterScene(2)
    scene.load("math")
    scene.load("math", in_place=True)
    scene.load("code")
    assert scene.unload("math").done
    assert [held(each) for each in scene.replicas] == [["code@1"], ["code@1"]]
    assert scene.ledger.adapter_ids() == {3}


def test_one_version_can_be_unloaded_by_its_full_name() -> None:
    scene = AdapterScene(1)
    scene.load("math")
    scene.load("math", in_place=True)
    scene.unload("math@1")
    assert live(scene.replicas[0]) == ["math@2"]


def test_two_loads_of_one_name_at_once_are_refused() -> None:
    scene = AdapterScene(1)
    scene.replicas[0].hangs_in = {LoadAdapter}
    scene.load("math")
    for name, action in (("math", scene.load), ("math", scene.unload), ("math@1", scene.unload)):
        with pytest.raises(Conflict, match="is being loaded"):
            action(name)
    scene.replicas[0].hangs_in = set()
    assert not scene.load("code").error


def test_what_is_not_there_cannot_be_unloaded() -> None:
    with pytest.raises(NotFound):
        AdapterScene(1).unload("math")


def test_there_is_a_limit_of_live_versions() -> None:
    scene = AdapterScene(1)
    scene.limits = AdapterLimits(most=1)
    scene.restart()
    scene.poll(2)
    scene.load("math")
    with pytest.raises(Conflict, match="limit"):
        scene.load("code")


def test_a_fleet_without_adapters_says_why() -> None:
    scene = AdapterScene(1)
    scene.limits = AdapterLimits(refusal="'engine.extra.enable_lora' is not set")
    scene.restart()
    for change in (scene.load, scene.unload):
        with pytest.raises(Conflict, match="enable_lora"):
            change("math")


def test_files_that_could_not_be_copied_leave_nothing_behind() -> None:
    scene = AdapterScene(1)
    adapter = scene.begin("math")
    scene.ledger.fail_adapter(adapter, NotFound("no such directory"), scene.now)
    scene.poll(2)
    assert scene.ledger.adapter_ids() == set() and scene.replicas[0].names() == []
    assert ended(scene.load("math")).full_name == "math@2"  # type: ignore[attr-defined]


# -- which names an adapter may have, and which number a version of it gets ------------------------


def test_a_number_is_never_given_twice() -> None:
    scene = AdapterScene(1)
    scene.load("math")
    scene.unload("math")
    scene.restart()
    scene.poll(2)
    assert ended(scene.load("math")).full_name == "math@2"  # type: ignore[attr-defined]


def test_numbers_are_not_given_twice_although_names_are_forgotten() -> None:
    catalog, seen = AdapterCatalog(), set[str]()
    for index in range(3 * REMEMBERED):
        name = f"run-v{index % (REMEMBERED + 7)}"
        adapter = next_adapter(catalog, LoadRequest(name=name, path="/a"))
        catalog = numbered(catalog, adapter)
        assert adapter.full_name not in seen
        seen.add(adapter.full_name)
    assert len(catalog.last_versions) == REMEMBERED


def test_a_client_may_number_names_itself() -> None:
    """As ART does: `run@7` is what it loads, asks for and unloads, and loads again after a restart."""
    scene = AdapterScene(2)
    for version in (1, 2):
        assert ended(scene.load("run@7", in_place=True)).version == version  # type: ignore[attr-defined]
    assert live(scene.replicas[0]) == ["run@7@1", "run@7@2"]
    ended(scene.unload("run@7"))
    assert live(scene.replicas[0]) == []


def test_no_name_stands_for_two_adapters() -> None:
    scene = AdapterScene(1)
    ended(scene.load("math"))
    with pytest.raises(InvalidRequest, match="'math@1' is version 1 of 'math', which does not change"):
        scene.load("math@1", in_place=True)
    ended(scene.load("math@2"))  # as a name of its own
    scene.replicas[0].hangs_in = {LoadAdapter}
    scene.load("math@3")
    scene.replicas[0].hangs_in = set()
    assert ended(scene.load("math", in_place=True)).full_name == "math@4"  # type: ignore[attr-defined]
    assert live(scene.replicas[0]) == ["math@1", "math@2@1", "math@3@1", "math@4"]


def test_a_version_is_not_called_as_the_base_model() -> None:
    scene = AdapterScene(1)
    ended(scene.load("base@1"))
    scene.ledger.state.adapter_limits = AdapterLimits(base_model="math@1")
    assert ended(scene.load("math")).full_name == "math@2"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 201, "base"])
def test_a_name_that_no_adapter_can_have_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        AdapterScene(1).load(name)


def test_a_name_that_is_live_needs_load_inplace() -> None:
    scene = AdapterScene(1)
    scene.load("math")
    with pytest.raises(InvalidRequest, match="already been loaded"):
        scene.load("math")


# -- joiners ----------------------------------------------------------------------------------------


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
    assert len(scene.ledger.state.adapters.timings) == 3
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
