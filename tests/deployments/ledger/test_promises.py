"""What a joiner was told to load stays in the store until it holds it, whatever the rate of rounds."""

from deployments.ledger.decisions import Promised, PromiseEnded, compact
from deployments.ledger.ledger import Ledger
from deployments.protocol.instructions import CatchUp, JoinAnswer
from deployments.protocol.reports import Outcome, Unloadable
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.ledger.ledger_scene import STORE, Scene, report_of

KEEP = 3


def removable(ledger: Ledger, on_disk: set[int], keep: int) -> list[int]:
    """All of them are this fleet's."""
    return ledger.promises.removable(dict.fromkeys(on_disk, "fleet"), keep)


class StoreScene(Scene):
    """Every round is stored at once, and what may be removed is."""

    def __init__(self, replicas: int, **config: float) -> None:
        self.disk: set[int] = set()
        super().__init__(replicas=replicas, **config)

    def round(self) -> int:
        version = report_of(self.publish()).version
        self.store(version)
        return version

    def store(self, version: int) -> None:
        self.disk.add(version)
        self.ledger.set_stored(version, f"/store/v{version}", None, self.now)
        self.remove_old()

    def remove_old(self) -> None:
        self.disk -= set(removable(self.ledger, self.disk, KEEP))

    def restart_twice(self) -> None:
        """From the journal as it was written, then from a compacted one."""
        self.restart()
        self.journal = compact(self.journal)
        self.restart()
        self.poll()

    def begin(self, name: str = "late", unloadable: Unloadable | None = None) -> JoinAnswer:
        """A process that starts; it polls when its engine is up, see `up`."""
        answer = self.ledger.join(name, f"{name}-1", self.now, unloadable)
        self.journal += self.ledger.take_decisions()
        return answer

    def up(self, answer: JoinAnswer, name: str = "late") -> FakeReplica:
        """Its engine is up with what it was told to load, which must be there until now."""
        assert answer.path is None or answer.version in self.disk, f"{answer} was removed: {self.disk}"
        replica = FakeReplica(replica_id=name, incarnation=f"{name}-1", version=answer.version)
        self.replicas.append(replica)
        self.poll(1)
        return replica


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
    promised = [each for each in scene.journal if isinstance(each, Promised)]
    assert [(each.replica_id, each.version) for each in promised] == [("late", 1)]
    late.hangs_in.clear()
    scene.poll()
    assert late.admitted and PromiseEnded(incarnation="late-1") in scene.journal


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


def test_what_is_newer_than_the_newest_known_version_stays() -> None:
    ledger = Ledger(store=STORE)
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


def test_a_digest_that_its_publisher_did_not_state_says_nothing_about_a_checkpoint() -> None:
    scene = StoreScene(replicas=0)
    scene.start(compares=False)
    scene.round()
    assert scene.begin().digest is None


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


def test_a_digest_of_what_arrived_is_that_of_the_checkpoint_although_nobody_stated_it() -> None:
    """vLLM's own wire, staged: tensors are hashed where they arrive."""
    scene = StoreScene(replicas=0)
    scene.start(compares=False, by_name=True)
    scene.round()
    assert scene.begin().digest == "aa"
    scene.restart()
    assert scene.begin().digest == "aa"
    assert [check.value for check in scene.ledger.history()[-1].checks] == ["names", "finite"]
