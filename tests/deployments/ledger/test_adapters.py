import pytest

from deployments.ledger.adapter_catalog import REMEMBERED, next_adapter, numbered
from deployments.protocol.adapters import (
    AdapterCatalog,
    AdapterTimings,
    LoadAdapter,
    LoadedAdapter,
    LoadRequest,
)
from deployments.protocol.errors import Conflict, FleetUnavailable, InvalidRequest, NotFound
from deployments.protocol.ledger_config import AdapterLimits
from deployments.protocol.poll import Outcome
from tests.deployments.ledger.adapter_scene import FILES, AdapterScene, ended, held, live, names


def test_an_adapter_is_live_on_all_replicas_when_its_load_is_answered() -> None:
    scene = AdapterScene(2)
    call = scene.load("math")
    assert ended(call).full_name == "math@1"  # type: ignore[attr-defined]
    assert [live(each) for each in scene.replicas] == [["math@1"], ["math@1"]]
    assert scene.ledger.adapters()[0].replicas == ("r0", "r1")


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


def test_times_are_kept_of_versions_that_are_there() -> None:
    scene = AdapterScene(2)
    for _ in range(8):
        ended(scene.load("math", in_place=True))
    listed = scene.ledger.adapters()
    assert len(scene.ledger.state.adapters.timings) == len(listed)
    assert all(each.timings is not None for each in listed)


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
    with pytest.raises(Conflict, match="enable_lora"):
        scene.load("math")


def test_files_that_could_not_be_copied_leave_nothing_behind() -> None:
    scene = AdapterScene(1)
    adapter = scene.begin("math")
    scene.ledger.fail_adapter(adapter, NotFound("no such directory"), scene.now)
    assert scene.ledger.adapter_ids() == set()
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
