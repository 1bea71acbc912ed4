from deployments.protocol.poll import CatchUp, JoinAnswer
from tests.deployments.ledger.store_scene import StoreScene


def test_a_joiner_loads_the_stored_version_and_serves_after_the_next_round() -> None:
    scene = StoreScene(replicas=1)
    scene.round()
    answer = scene.begin()
    for _ in range(20):  # its engine starts for long
        scene.round()
        scene.now += 1.4
    assert answer.version == 1 and scene.begin("other").version == 21
    late = scene.up(answer)
    scene.round()
    assert late.admitted and late.version == 22


def test_a_joiner_is_told_whose_version_it_loads_and_with_which_digest() -> None:
    scene = StoreScene(replicas=2)
    scene.round()
    expected = JoinAnswer(version=1, path="/store/v1", fleet_id="fleet", digest="aa")
    assert scene.begin() == expected
    scene.restart()
    assert scene.begin() == expected, "the digest is in the journal"
    late = scene.start(version=0)
    scene.wait(2)
    (told,) = [each.body for each in late.ran if isinstance(each.body, CatchUp)]
    assert (told.version, told.fleet_id, told.digest) == (1, "fleet", "aa")


def test_a_digest_of_live_parameters_says_nothing_about_a_checkpoint() -> None:
    scene = StoreScene(replicas=0)
    scene.start(compares=False, updates_in_place=True)
    scene.round()
    assert scene.begin().digest is None


def test_a_digest_of_what_arrived_is_that_of_the_checkpoint_although_nobody_stated_it() -> None:
    """vLLM's own wire, staged: tensors are hashed where they arrive."""
    scene = StoreScene(replicas=0)
    scene.start(compares=False)
    scene.round()
    assert scene.begin().digest == "aa"
    scene.restart()
    assert scene.begin().digest == "aa"
    assert [check.value for check in scene.ledger.history()[-1].checks] == ["names", "finite"]
