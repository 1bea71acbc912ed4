"""Adapters become live on all replicas or on none, and go everywhere: the ledger with replicas that fail."""

import pytest

from deployments.errors import Conflict, FleetUnavailable, InvalidRequest, NotFound
from deployments.ledger.adapters.catalog import REMEMBERED, AdapterLimits, next_adapter, numbered
from deployments.ledger.decisions import compact, decode, encode
from deployments.ledger.ledger import Ledger
from deployments.ledger.members import PendingCall
from deployments.protocol.adapters import AdapterCatalog, AdapterFiles, DropAdapter, LoadAdapter, SetAdapters
from deployments.protocol.instructions import CommitMode, Verify
from deployments.protocol.reports import Outcome
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.ledger.ledger_scene import STORE, Scene, report_of

FILES = AdapterFiles(path="/store/adapters/1", digest="d", size_bytes=10)


class AdapterScene(Scene):
    """A scene whose fleet serves adapters."""

    limits = AdapterLimits(base_model="base")

    def load(self, name: str, *, in_place: bool = False, polls: int = 8) -> PendingCall:
        adapter = self.ledger.adapters.begin(name, in_place=in_place, is_3d=False, now=self.now)
        call = self.ledger.adapters.stage(adapter, FILES, self.now)
        self.ledger.tick(self.now)
        self.poll(polls)
        return call

    def unload(self, name: str, *, polls: int = 8) -> PendingCall:
        call = self.ledger.adapters.unload(name, self.now)
        self.ledger.tick(self.now)
        self.poll(polls)
        return call

    def restart(self) -> None:
        self.journal = compact([decode(encode(each)) for each in self.journal])
        super().restart()


def live(replica: FakeReplica) -> list[str]:
    return [each.full_name for each in replica.adapters.live.values()]


def held(replica: FakeReplica) -> list[str]:
    return [each.full_name for each in replica.adapters.held.values()]


def names(scene: AdapterScene, state: str = "live") -> list[str]:
    return [f"{each.name}@{each.version}" for each in scene.ledger.adapters.status() if each.state == state]


def ended(call: PendingCall) -> object:
    assert call.done and call.error is None, call.error
    return call.result


def test_an_adapter_is_live_on_all_replicas_when_its_load_is_answered() -> None:
    scene = AdapterScene(2)
    call = scene.load("math")
    assert ended(call).full_name == "math@1"  # type: ignore[attr-defined]
    assert [live(each) for each in scene.replicas] == [["math@1"], ["math@1"]]
    assert scene.ledger.adapters.status()[0].replicas == ("r0", "r1")


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
    begin = scene.ledger.adapters.begin
    for after, live in ((1, 0), (0, 1), (2, 1)):
        if live and not names(scene):
            ended(scene.load("math"))
        with pytest.raises(Conflict, match=f"is at version {live}, expected {after}"):
            begin("math", in_place=True, is_3d=False, now=scene.now, after=after)
    assert names(scene) == ["math@1"] and names(scene, "loading") == []
    assert begin("math", in_place=True, is_3d=False, now=scene.now, after=1).version == 2


def test_the_decision_is_durable_before_a_replica_learns_of_it() -> None:
    scene = AdapterScene(2)
    adapter = scene.ledger.adapters.begin("math", in_place=False, is_3d=False, now=scene.now)
    scene.ledger.adapters.stage(adapter, FILES, scene.now)
    scene.ledger.tick(scene.now)
    for _ in range(8):
        for replica in scene.replicas:
            directive = scene.ledger.poll(replica.report(), scene.now)
            scene.journal += scene.ledger.take_decisions()
            successor = Ledger(scene.config, STORE, scene.size)
            successor.recover(scene.journal, scene.now)
            known = {each.adapter_id for each in successor.adapters.catalog.live}
            for instruction in directive.instructions:
                if isinstance(instruction.body, SetAdapters):
                    assert {each.adapter_id for each in instruction.body.live} <= known
                if isinstance(instruction.body, LoadAdapter):
                    assert successor.adapters.catalog.last_id >= instruction.body.adapter.adapter_id
            replica.take(directive)
    assert live(scene.replicas[0]) == ["math@1"]


def test_what_one_replica_rejects_no_replica_keeps() -> None:
    scene = AdapterScene(2)
    scene.replicas[1].outcomes[LoadAdapter] = Outcome.REJECTED
    call = scene.load("math")
    assert isinstance(call.error, Conflict) and "r1" in call.error.message
    assert [held(each) for each in scene.replicas] == [[], []]
    assert names(scene) == [] and scene.ledger.adapters.needed() == set()
    assert [scene.state_of(each) for each in scene.replicas] == ["serving", "serving"]


def test_the_error_is_answered_once_no_replica_has_it() -> None:
    scene = AdapterScene(2)
    scene.replicas[1].outcomes[LoadAdapter] = Outcome.REJECTED
    scene.replicas[0].hangs_in = {DropAdapter}
    call = scene.load("math")
    assert held(scene.replicas[0]) == ["math@1"] and not call.done
    scene.replicas[0].hangs_in = set()
    scene.poll(4)
    assert call.error is not None and held(scene.replicas[0]) == []


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


@pytest.mark.parametrize("step", [LoadAdapter, SetAdapters])
def test_a_replica_that_dies_in_the_middle_does_not_stop_the_load(step: type) -> None:
    scene = AdapterScene(2)
    scene.replicas[1].hangs_in = {step}
    call = scene.load("math")
    dead = scene.replicas.pop()
    scene.ledger.lost(dead.replica_id, dead.incarnation, "gone", scene.now)
    scene.poll(4)
    assert ended(call) and live(scene.replicas[0]) == ["math@1"]


def test_with_too_few_replicas_left_the_load_fails() -> None:
    scene = AdapterScene(2, min_replicas=2)
    scene.replicas[1].hangs_in = {LoadAdapter}
    call = scene.load("math")
    dead = scene.replicas.pop()
    scene.ledger.lost(dead.replica_id, dead.incarnation, "gone", scene.now)
    scene.poll(4)
    assert isinstance(call.error, FleetUnavailable)
    assert held(scene.replicas[0]) == []


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
    assert running in scene.ledger.adapters.needed()  # its files stay: the engine may read them again
    scene.replicas[0].adapters.end(running)
    scene.poll(2)
    assert held(scene.replicas[0]) == ["math@2"] and names(scene, "retired") == []
    assert scene.ledger.adapters.needed() == {2}


def test_the_newest_versions_of_a_name_stay() -> None:
    scene = AdapterScene(1)  # keeps two
    for _ in range(4):
        ended(scene.load("math", in_place=True))
    ended(scene.load("code"))
    assert names(scene) == ["math@3", "math@4", "code@1"] == live(scene.replicas[0])


def test_unloading_a_name_unloads_all_its_versions_everywhere() -> None:
    scene = AdapterScene(2)
    scene.load("math")
    scene.load("math", in_place=True)
    scene.load("code")
    assert scene.unload("math").done
    assert [held(each) for each in scene.replicas] == [["code@1"], ["code@1"]]
    assert scene.ledger.adapters.needed() == {3}


def test_one_version_can_be_unloaded_by_its_full_name() -> None:
    scene = AdapterScene(1)
    scene.load("math")
    scene.load("math", in_place=True)
    scene.unload("math@1")
    assert live(scene.replicas[0]) == ["math@2"]


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
        adapter = next_adapter(catalog, f"run-v{index % (REMEMBERED + 7)}", is_3d=False)
        catalog = numbered(catalog, adapter)
        assert adapter.full_name not in seen
        seen.add(adapter.full_name)
    assert len(catalog.last_versions) == REMEMBERED


def test_two_loads_of_one_name_at_once_are_refused() -> None:
    scene = AdapterScene(1)
    scene.replicas[0].hangs_in = {LoadAdapter}
    scene.load("math")
    for name, action in (("math", scene.load), ("math", scene.unload), ("math@1", scene.unload)):
        with pytest.raises(Conflict, match="is being loaded"):
            action(name)
    scene.replicas[0].hangs_in = set()
    assert not scene.load("code").error


@pytest.mark.parametrize("name", ["", "a@1", "a\nb", "x" * 201, "base"])
def test_a_name_that_no_adapter_can_have_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        AdapterScene(1).load(name)


def test_a_name_that_is_live_needs_load_inplace() -> None:
    scene = AdapterScene(1)
    scene.load("math")
    with pytest.raises(InvalidRequest, match="already been loaded"):
        scene.load("math")


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
    adapter = scene.ledger.adapters.begin("math", in_place=False, is_3d=False, now=scene.now)
    scene.ledger.adapters.give_up(adapter, "no such directory", scene.now)
    assert scene.ledger.adapters.needed() == set()
    assert ended(scene.load("math")).full_name == "math@2"  # type: ignore[attr-defined]


# -- a restart of the controller ---------------------------------------------------------------


def test_after_a_restart_in_the_middle_of_a_load_no_replica_keeps_it() -> None:
    scene = AdapterScene(2)
    scene.replicas[1].hangs_in = {LoadAdapter}
    scene.load("math")
    scene.restart()
    scene.replicas[1].hangs_in = set()
    scene.poll(6)
    assert [held(each) for each in scene.replicas] == [[], []]
    assert scene.ledger.adapters.needed() == set()
    assert ended(scene.load("code")).adapter_id == 2  # type: ignore[attr-defined]


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
    assert running in scene.ledger.adapters.needed()
    scene.poll(3)
    assert running in scene.ledger.adapters.needed()
    scene.replicas[1].adapters.end(running)
    scene.poll(3)
    assert scene.ledger.adapters.needed() == set()


def test_a_retired_version_that_was_never_live_on_a_replica_is_dropped_there() -> None:
    scene = AdapterScene(2)
    scene.replicas[1].hangs_in = {SetAdapters}
    scene.load("math")
    scene.restart()
    scene.poll(1)
    call = scene.unload("math")
    scene.replicas[1].hangs_in = set()
    scene.poll(6)
    assert call.done and [held(each) for each in scene.replicas] == [[], []]
    assert scene.ledger.adapters.needed() == set()


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
    call = scene.ledger.adapters.unload("math", scene.now)
    scene.ledger.tick(scene.now)
    scene.poll(3, only=scene.replicas[:1])
    assert not call.done
    late.take(directive)
    scene.poll(6)
    assert call.done and live(late) == []


def test_a_load_is_answered_when_no_replica_takes_requests_that_does_not_have_it() -> None:
    scene = AdapterScene(2, min_replicas=1)
    scene.replicas[1].outcomes[LoadAdapter] = Outcome.REPLICA_FAILED
    scene.load("math", polls=1)
    unheard = scene.replicas[1]
    scene.ledger.poll(unheard.report(), scene.now)  # its fence is decided, and does not reach it
    [call] = [load.call for load in scene.ledger.adapters._loads.values()]
    assert call is not None
    scene.poll(6, only=scene.replicas[:1])
    assert live(scene.replicas[0]) == ["math@1"] and not call.done
    scene.poll(3)
    assert ended(call) and unheard.fenced


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


def test_adapters_stay_live_over_a_round() -> None:
    scene = AdapterScene(2)
    scene.load("math")
    assert scene.publish().error is None
    assert [live(each) for each in scene.replicas] == [["math@1"], ["math@1"]]
    assert [each.version for each in scene.replicas] == [1, 1]


def test_a_load_in_the_middle_of_a_round_ends() -> None:
    scene = AdapterScene(2)
    scene.connect()
    round_id = scene.receive()
    assert ended(scene.load("math"))
    call = scene.close(round_id)
    scene.poll(10)
    assert call.error is None


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


def test_while_the_weights_sleep_nothing_is_loaded() -> None:
    scene = AdapterScene(1)
    scene.call("sleep 1")
    with pytest.raises(Conflict, match="sleep"):
        scene.load("math")
