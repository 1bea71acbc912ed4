"""A ledger whose versions are stored at once."""

from deployments.protocol.poll import JoinAnswer, Unloadable
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.ledger.ledger_scene import Scene, report_of


class StoreScene(Scene):
    """Every round is stored at once."""

    def round(self) -> int:
        version = report_of(self.publish()).version
        self.store(version)
        return version

    def store(self, version: int) -> None:
        self.ledger.set_stored(version, f"/store/v{version}", None, self.now)

    def begin(self, name: str = "late", unloadable: Unloadable | None = None) -> JoinAnswer:
        """A process that starts; it polls when its engine is up, see `up`."""
        answer = self.ledger.join(name, f"{name}-1", self.now, unloadable)
        self.journal += self.ledger.take_decisions()
        return answer

    def up(self, answer: JoinAnswer, name: str = "late") -> FakeReplica:
        """Its engine is up with what it was told to load."""
        replica = FakeReplica(replica_id=name, incarnation=f"{name}-1", version=answer.version)
        self.replicas.append(replica)
        self.poll(1)
        return replica
