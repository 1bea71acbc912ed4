from typing import Any

import pytest

from deployments.ledger.state import PendingCall
from deployments.protocol.adapters import Adapter
from deployments.protocol.errors import Conflict, FleetUnavailable, StalePublisher
from deployments.protocol.poll import Outcome, Receive
from tests.deployments.ledger.adapter_scene import FILES, AdapterScene, ended, held, live, names
from tests.deployments.ledger.ledger_scene import GROUP

LOAD = "1" * 32


def send(scene: AdapterScene, *, polls: int = 4) -> PendingCall:
    call = scene.ledger.send(scene.token, LOAD, {}, scene.now)
    scene.poll(polls)
    return call


def connected(init_info: dict[str, Any] | None = None) -> AdapterScene:
    scene = AdapterScene(2)
    assert scene.connect(init_info).error is None
    return scene


def received(scene: AdapterScene) -> tuple[str, ...]:
    [status] = scene.ledger.adapters()
    return tuple(status.received)


@pytest.mark.parametrize("init_info", [{}, GROUP])
def test_a_load_after_a_transfer_takes_what_arrived_and_says_so(init_info: dict[str, Any]) -> None:
    scene = connected(init_info)
    ended(send(scene))
    ended(scene.load("math", load_id=LOAD))
    assert received(scene) == ("r0", "r1") and names(scene) == ["math@1"]
    ended(send(scene))  # over the same connection
    ended(scene.load("code", load_id=LOAD))


@pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.TRANSFER_FAILED])
def test_a_replica_without_the_bytes_is_named_and_loads_the_stores_copy(outcome: Outcome) -> None:
    scene = connected()
    scene.replicas[1].outcomes[Receive] = outcome
    call = send(scene)
    assert isinstance(call.error, Conflict) and list(call.error.detail["replicas"]) == ["r1"]
    ended(scene.load("math", load_id=LOAD))
    assert [scene.state_of(each) for each in scene.replicas] == ["serving", "serving"]
    assert received(scene) == ("r0",)


def test_a_group_in_which_a_transfer_failed_is_not_used_again() -> None:
    scene = connected(GROUP)
    scene.replicas[0].outcomes[Receive] = Outcome.TRANSFER_FAILED
    assert send(scene).error is not None
    with pytest.raises(Conflict, match="connect before"):
        send(scene)
    scene.replicas[0].outcomes.clear()
    scene.connect(GROUP)
    ended(send(scene))


def test_a_replica_that_is_lost_in_a_transfer_ends_it_at_once() -> None:
    scene = connected(GROUP)
    for replica in scene.replicas:
        replica.hangs_in = {Receive}
    call = send(scene)
    assert not call.done
    scene.ledger.lost([("r1", "r1-1")], "its process is gone", scene.now)
    assert isinstance(call.error, Conflict) and "r1" in call.error.message
    scene.poll(only=scene.replicas[:1])
    assert "drop" in scene.replicas[0].names() and scene.replicas[0].fenced is None
    assert scene.status().connected is None
    scene.replicas[0].hangs_in = set()
    load = scene.begin("math")
    loading = scene.ledger.stage_adapter(load, FILES, scene.now)
    scene.ledger.complete_adapter(load, scene.now)
    scene.ledger.tick(scene.now)
    scene.poll(8, only=scene.replicas[:1])
    assert ended(loading) and live(scene.replicas[0]) == ["math@1"]


@pytest.mark.parametrize("end", ["release", "expire", "acquire", "send"])
def test_a_transfer_ends_with_its_publishers_turn(end: str) -> None:
    scene = connected()
    scene.replicas[1].hangs_in = {Receive}
    call = send(scene)
    match end:
        case "release":
            scene.ledger.release(scene.token, scene.now)
        case "expire":
            scene.wait(scene.config.lease_s + 1)
        case "acquire":
            scene.ledger.acquire("trainer", scene.now)
        case "send":
            scene.ledger.send(scene.token, LOAD, {}, scene.now)
    scene.replicas[1].hangs_in = set()
    scene.poll()
    assert isinstance(call.error, Conflict) and "no longer waited for" in call.error.message
    assert "drop" in scene.replicas[1].names()
    ended(scene.load("math", load_id=LOAD))
    assert [scene.state_of(each) for each in scene.replicas] == ["serving", "serving"]


def test_one_that_stands_still_in_a_transfer_is_fenced_at_its_deadline() -> None:
    scene = connected()
    scene.replicas[1].hangs_in = {Receive}
    call = send(scene)
    for _ in range(int(scene.config.stage_timeout_s + scene.config.grace_s + 2)):
        scene.ledger.renew(scene.token, scene.now)
        scene.wait(1)
    assert call.error is not None and scene.replicas[1].fenced is not None


def test_a_group_that_lost_a_member_or_has_none_sends_nothing() -> None:
    scene = connected(GROUP)
    scene.start()
    scene.poll()
    with pytest.raises(Conflict, match="connect again"):
        send(scene)
    other = AdapterScene(1)
    other.token = other.ledger.acquire("trainer", other.now).token
    with pytest.raises(Conflict, match="connect before"):
        send(other)


def test_no_round_is_beside_a_transfer() -> None:
    scene = connected()
    scene.open()
    with pytest.raises(Conflict, match="cannot send an adapter while round 1 is open"):
        send(scene)
    scene.ledger.release(scene.token, scene.now)
    before, scene.token = scene.token, scene.ledger.acquire("somebody else", scene.now).token
    with pytest.raises(Conflict, match="connect before"):
        send(scene)  # over a connection that is not its own
    scene.token = before
    with pytest.raises(StalePublisher):
        send(scene)


def staged_early(scene: AdapterScene) -> tuple[Adapter, PendingCall]:
    """Loaded from what arrived, while the fleet's copy is written."""
    adapter = scene.begin("math", in_place=True, load_id=LOAD)
    call = scene.ledger.stage_adapter(adapter, FILES, scene.now)
    scene.ledger.tick(scene.now)
    scene.poll(6)
    return adapter, call


def test_what_all_replicas_hold_is_live_when_the_fleets_copy_is_complete() -> None:
    scene = connected()
    ended(send(scene))
    adapter, call = staged_early(scene)
    assert [held(each) for each in scene.replicas] == [["math@1"]] * 2
    assert not call.done and names(scene) == [] and [live(each) for each in scene.replicas] == [[], []]
    scene.ledger.complete_adapter(adapter, scene.now)
    scene.ledger.tick(scene.now)
    scene.poll(4)
    assert ended(call) and names(scene) == ["math@1"]


def test_without_a_copy_no_replica_keeps_what_it_has_loaded() -> None:
    scene = connected()
    ended(send(scene))
    adapter, call = staged_early(scene)
    scene.ledger.fail_adapter(adapter, FleetUnavailable("the disk is full"), scene.now)
    scene.ledger.tick(scene.now)
    scene.poll(6)
    assert isinstance(call.error, FleetUnavailable) and [held(each) for each in scene.replicas] == [[], []]
    scene.ledger.complete_adapter(adapter, scene.now)  # of what is over
    scene.ledger.fail_adapter(adapter, FleetUnavailable("again"), scene.now)
    ended(scene.load("math"))


def test_a_successor_drops_what_was_loaded_and_not_stored() -> None:
    scene = connected()
    ended(send(scene))
    staged_early(scene)
    scene.restart()
    scene.poll(6)
    assert names(scene) == [] and [held(each) for each in scene.replicas] == [[], []]
    ended(scene.load("math"))


def test_a_successor_of_the_controller_loads_what_had_arrived() -> None:
    scene = connected()
    ended(send(scene))
    scene.restart()
    scene.poll()
    ended(scene.load("math", load_id=LOAD))
    assert received(scene) == ("r0", "r1")
