"""A stored version that does not load is not named again, and the next round helps."""

from deployments.protocol.poll import CatchUp, JoinAnswer, Outcome, Unloadable
from tests.deployments.ledger.store_scene import StoreScene


def test_a_version_that_cannot_be_loaded_is_not_named_again_and_the_next_round_helps() -> None:
    scene = StoreScene(replicas=1)
    scene.round()
    assert (scene.begin().version, scene.begin().path) == (1, "/store/v1")
    refused = Unloadable(version=1, reason="version 1 must be in /store/v1, and there is none")
    answer = scene.begin(unloadable=refused)
    assert answer == JoinAnswer(version=0, path=None)
    assert scene.begin("other").version == 1, "its own disk may be the reason"
    late = scene.up(answer)
    scene.wait(5)
    assert late.fenced is None and not late.admitted and "catch_up" not in late.names()
    assert scene.status().store_problem == (
        "late cannot load version 1 from the store: version 1 must be in /store/v1, and there is none"
    )
    scene.round()
    assert late.admitted and late.version == 2 and scene.status().store_problem is None


def test_a_newer_version_is_named_to_one_that_could_not_load_an_older_one() -> None:
    scene = StoreScene(replicas=1)
    scene.round()
    scene.begin()
    scene.round()
    assert scene.begin(unloadable=Unloadable(version=1, reason="gone")).version == 2


def test_a_member_that_cannot_read_what_it_is_to_load_is_intact_and_waits_for_the_next_round() -> None:
    scene = StoreScene(replicas=1)
    scene.publish()
    late = scene.up(JoinAnswer(version=0, path=None))
    late.outcomes[CatchUp] = Outcome.REJECTED
    scene.store(1)
    scene.wait(5)
    assert late.fenced is None and late.names().count("catch_up") == 1
    assert scene.status().store_problem == "late cannot load version 1 from the store: rejected here"
    scene.round()
    assert late.admitted and late.version == 2


def test_a_version_in_which_three_replicas_were_lost_is_given_up_for_a_while() -> None:
    """Its files are intact, and engines do not start with it: replicas would be restarted for ever."""
    scene = StoreScene(replicas=1)
    scene.round()
    for name in ("a", "b", "c"):
        assert scene.ledger.status(scene.now).store_problem is None
        assert scene.begin(name).version == 1
        scene.ledger.lost([(name, f"{name}-1")], "its process is gone", scene.now)
    problem = scene.ledger.status(scene.now).store_problem
    assert problem == "version 1 does not load: 3 replicas were lost in it (a, b, c)"
    assert [each.name for each in scene.ledger.events_since(0)].count("given_up") == 1
    assert scene.replicas[0].admitted, "who serves goes on"
    answer = scene.begin("d")
    assert answer == JoinAnswer(version=0, path=None)
    late = scene.up(answer, "d")
    scene.wait(60)
    assert CatchUp.name not in late.names(), "it would be lost as well"
    scene.round()
    assert late.admitted and late.version == 2, "a round carries all weights"
    assert scene.begin("e").version == 2
    assert scene.ledger.status(scene.now).store_problem is None


def test_a_version_that_was_given_up_is_tried_again_later() -> None:
    scene = StoreScene(replicas=1)
    scene.round()
    for name in ("a", "b", "c"):
        scene.begin(name)
        scene.ledger.lost([(name, f"{name}-1")], "its process is gone", scene.now)
    scene.wait(601)
    assert scene.begin("d").version == 1
    assert scene.ledger.status(scene.now).store_problem is None


def test_a_replica_that_loads_a_version_clears_it() -> None:
    scene = StoreScene(replicas=1)
    scene.round()
    for name in ("a", "b"):
        scene.begin(name)
        scene.ledger.lost([(name, f"{name}-1")], "its process is gone", scene.now)
    assert scene.up(scene.begin("c"), "c").admitted
    scene.begin("d")
    scene.ledger.lost([("d", "d-1")], "its process is gone", scene.now)
    assert scene.begin("e").version == 1


def test_a_version_in_which_catching_up_fails_is_given_up() -> None:
    scene = StoreScene(replicas=1)
    scene.round()
    for _ in range(2):
        scene.start(outcomes={CatchUp: Outcome.REPLICA_FAILED})
        scene.wait(5)
    died = scene.start(hangs_in={CatchUp})
    scene.wait(5)
    assert scene.ledger.status(scene.now).store_problem is None
    scene.replicas.remove(died)
    scene.ledger.lost([(died.replica_id, died.incarnation)], "its process is gone", scene.now)
    assert "does not load: 3 replicas were lost in it" in str(scene.ledger.status(scene.now).store_problem)
    last = scene.up(scene.begin("last"), "last")
    scene.wait(60)
    assert CatchUp.name not in last.names() and last.fenced is None
