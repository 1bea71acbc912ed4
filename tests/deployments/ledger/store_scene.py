"""A ledger whose versions are stored at once and removed as soon as they may be."""

from deployments.ledger.ledger import Ledger
from deployments.protocol.poll import JoinAnswer, Unloadable
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.ledger.ledger_scene import Scene, report_of

KEEP = 3


def removable(ledger: Ledger, on_disk: set[int], keep: int) -> list[int]:
    """All of them are this fleet's."""
    return ledger.removable(dict.fromkeys(on_disk, "fleet"), keep)


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
