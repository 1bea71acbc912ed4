from deployments.ledger.decisions import Pinned, Unpinned
from deployments.ledger.ledger import Ledger
from deployments.protocol.poll import CatchUp, JoinAnswer, Unloadable
from tests.deployments.ledger.ledger_scene import STORE
from tests.deployments.ledger.store_scene import KEEP, StoreScene, removable


def test_a_joiner_finds_what_it_was_promised_and_serves_after_the_next_round() -> None:
    scene = StoreScene(replicas=1)
    scene.round()
    answer = scene.begin()
    for _ in range(20):  # its engine starts for long
        scene.round()
        scene.now += 1.4
    assert scene.disk == {1, 19, 20, 21}
    late = scene.up(answer)
    scene.round()
    assert late.admitted and late.version == 22
    scene.remove_old()
    assert scene.disk == {20, 21, 22}


def test_a_question_that_comes_again_has_the_same_answer() -> None:
    """The first one may come last; whichever answer is heard, its version is there when the engine is up."""
    scene = StoreScene(replicas=1)
    scene.round()
    answer = scene.begin()
    for _ in range(5):
        scene.round()
    assert scene.begin() == answer
    scene.restart_twice()
    for _ in range(5):
        scene.round()
    assert scene.begin() == answer
    late = scene.up(answer)
    for _ in range(5):
        scene.round()
    assert late.version == 16 and 1 not in scene.disk


def test_a_late_refusal_of_another_version_does_not_take_away_what_is_loaded_now() -> None:
    scene = StoreScene(replicas=1)
    scene.round()
    damaged = Unloadable(version=scene.begin().version, reason="damaged")
    scene.round()
    answer = scene.begin(unloadable=damaged)
    assert answer.version == 2
    for _ in range(5):
        scene.round()
    assert scene.begin(unloadable=damaged) == answer, "the same question, which had no answer in time"
    for _ in range(5):
        scene.round()
    scene.up(answer)


def test_a_restarted_controller_keeps_its_promises() -> None:
    scene = StoreScene(replicas=1)
    scene.round()
    answer = scene.begin()
    scene.restart_twice()
    for _ in range(5):
        scene.round()
    scene.up(answer)
    scene.round()
    scene.restart()
    assert removable(scene.ledger, {1, 5, 6, 7, 8}, KEEP) == [1, 5]


def test_nothing_is_kept_for_a_joiner_that_died_before_its_first_poll() -> None:
    scene = StoreScene(replicas=1)
    scene.round()
    scene.begin()
    scene.now += 10
    assert ("late", "late-1") in scene.ledger.silent_since(scene.now - 2), "nobody looks whether it lives"
    for _ in range(4):
        scene.round()
    assert 1 in scene.disk
    scene.ledger.lost([("late", "late-1")], "its process is gone", scene.now)
    scene.remove_old()
    assert scene.disk == {3, 4, 5}


def test_a_joiner_that_hangs_does_not_keep_its_version_for_ever() -> None:
    scene = StoreScene(replicas=1, join_timeout_s=100)
    scene.round()
    scene.begin()
    for _ in range(4):
        scene.round()
    scene.wait(99)
    scene.remove_old()
    assert 1 in scene.disk
    scene.wait(2)
    scene.remove_old()
    assert scene.disk == {3, 4, 5}
    assert [each.name for each in scene.ledger.events_since(0)].count("promise_lapsed") == 1


def test_each_replica_keeps_one_version_at_most() -> None:
    scene = StoreScene(replicas=1)
    for count in range(10):
        scene.round()
        scene.begin("a")
        scene.begin(f"b{count % 2}")
    assert len(scene.disk) <= KEEP + 3


def test_a_member_that_is_told_to_catch_up_finds_the_version() -> None:
    scene = StoreScene(replicas=1)
    scene.publish()
    late = scene.up(JoinAnswer(version=0, path=None))
    late.hangs_in.add(CatchUp)
    scene.store(1)
    scene.wait(2)
    assert "catch_up" in next(each.pending for each in scene.status().members if each.replica_id == "late")
    assert removable(scene.ledger, {1, 2, 3, 4}, 1) == []
    promised = [each for each in scene.journal if isinstance(each, Pinned)]
    assert [(each.replica_id, each.version) for each in promised] == [("late", 1)]
    late.hangs_in.clear()
    scene.poll()
    assert late.admitted and Unpinned(incarnation="late-1") in scene.journal


def test_what_is_newer_than_the_newest_known_version_stays() -> None:
    ledger = Ledger(store_dir=STORE)
    ledger.recover([], 0.0)
    assert removable(ledger, {1, 2, 3, 4}, 1) == []


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
