from deployments.ledger.stored_versions import RETRY_S
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


def test_a_refusal_lapses() -> None:
    scene = StoreScene(replicas=1)
    scene.round()
    scene.begin(unloadable=Unloadable(version=1, reason="damaged"))
    scene.wait(RETRY_S - 1)
    assert scene.status().store_problem is not None
    scene.wait(2)
    assert scene.status().store_problem is None and scene.begin().version == 1
