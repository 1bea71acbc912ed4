import pytest

from deployments.ledger.decisions import Founded, decode, encode
from deployments.ledger.stored_versions import RETRY_S
from deployments.protocol.poll import InitialWeights, JoinAnswer, Unloadable
from tests.deployments.ledger.compacted import compact
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.ledger.store_scene import StoreScene

ONE, OTHER = InitialWeights(digest="1" * 32), InitialWeights(digest="2" * 32)
BOTH = f"loaded digest {'2' * 32} as version 0, which is digest {'1' * 32}"


def test_a_joiner_with_other_weights_is_refused_with_both_digests() -> None:
    scene = StoreScene(replicas=0)
    first = scene.start(initial=ONE)
    assert scene.begin() == JoinAnswer(version=0, path=None, initial=ONE, served=True)
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
    scene.poll()
    assert scene.status().initial == ONE and scene.begin().served, "one that has not polled yet counts"
    other = scene.start(initial=OTHER)
    scene.poll()
    assert not other.admitted and other.fenced is not None and BOTH in other.fenced


def test_a_fleet_from_before_learns_it_from_the_first_that_is_admitted() -> None:
    scene = StoreScene(replicas=0)
    scene.ledger.take_decisions()
    scene.journal = [decode('{"kind": "founded", "fleet_id": "old", "model": "m"}')]
    scene.restart()
    assert scene.begin() == JoinAnswer(version=0, path=None)
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
    assert scene.begin() == JoinAnswer(version=0, path=None)
    late = scene.start(initial=OTHER)
    scene.publish()
    assert late.admitted and late.version == 2


def test_one_that_refuses_to_load_is_the_reason_why_replicas_are_missing_while_it_asks() -> None:
    scene = StoreScene(replicas=0)
    scene.start(initial=ONE)
    scene.poll()
    found = Unloadable(version=0, reason="expected digest 1, got digest 2")
    for _ in range(3):  # it asks again every second
        assert scene.begin(unloadable=found) == JoinAnswer(version=0, path=None, initial=ONE, served=True)
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
    assert scene.begin() == JoinAnswer(version=0, path=None, initial=ONE)
