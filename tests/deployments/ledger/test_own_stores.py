"""A fleet whose hosts have a store of their own each (`store.shared: false`)."""

from deployments.ledger.stored_versions import RETRY_S
from deployments.protocol.poll import CatchUp, Commit, JoinAnswer, Outcome, Receive, Unloadable, WriteVersion
from deployments.protocol.routing import ReplicaEndpoint
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.ledger.store_scene import StoreScene

OWN, SHARED = {"shared_store": False}, {"shared_store": True}


def scene_of(**config: bool) -> StoreScene:
    scene = StoreScene(2, **config)
    for replica in scene.replicas:
        replica.endpoint = ReplicaEndpoint(address=f"{replica.replica_id}:1", key="k")
    scene.round()
    return scene


def ran(replica: FakeReplica, kind: type) -> list[object]:
    return [each.body for each in replica.ran if isinstance(each.body, kind)]


def test_every_commit_is_kept_on_each_host_whoever_published_it() -> None:
    for config, kept in ((OWN, True), (SHARED, False)):
        scene = scene_of(**config)
        for replica in scene.replicas:
            (commit,), (received, *_) = ran(replica, Commit), ran(replica, Receive)
            assert isinstance(commit, Commit) and isinstance(received, Receive)
            fleet_id = scene.ledger.state.fleet_id
            own = WriteVersion(version=1, label=None, fleet_id=fleet_id, digest="aa")
            assert commit.keep == (own if kept else None), config
            assert received.retain_version == (1 if kept else None), config


def test_a_joiner_is_told_who_may_have_its_version() -> None:
    for config in (OWN, SHARED):
        scene = scene_of(**config)
        one, other = scene.replicas
        holders = (one.endpoint, other.endpoint) if config is OWN else ()
        assert scene.begin().holders == holders
        scene.replicas.remove(other)
        scene.ledger.lost([(other.replica_id, other.incarnation)], "killed", scene.now)
        assert scene.begin().holders == holders[:1]


def test_one_that_found_no_holder_asks_again_though_no_round_comes() -> None:
    """All of a fleet start at once: the host of the first one that serves may be the only one that has it."""
    for config in (OWN, SHARED):
        scene = scene_of(**config)
        unloadable = Unloadable(version=1, reason="no replica gave version 1")
        assert scene.begin().version == 1
        answer = scene.begin(unloadable=unloadable)
        assert answer == JoinAnswer(version=0, path=None)
        late = scene.up(answer)
        scene.wait(RETRY_S - 5)
        assert not late.admitted and not ran(late, CatchUp), config
        late.outcomes[CatchUp] = Outcome.REJECTED
        scene.wait(10)
        scene.wait(RETRY_S - 15)
        assert len(ran(late, CatchUp)) == 1 and late.fenced is None
        late.outcomes.clear()
        scene.wait(20)
        assert late.admitted
