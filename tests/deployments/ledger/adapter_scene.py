"""A ledger whose fleet serves adapters, for the tables."""

from typing import Any

from deployments.ledger.decisions import decode, encode
from deployments.ledger.state import PendingCall
from deployments.protocol.adapters import Adapter, AdapterFiles, LoadRequest
from deployments.protocol.ledger_config import AdapterLimits
from tests.deployments.ledger.compacted import compact
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.ledger.ledger_scene import Scene

FILES = AdapterFiles(path="/store/adapters/1", digest="d", size_bytes=10)


class AdapterScene(Scene):
    """A scene whose fleet serves adapters."""

    limits = AdapterLimits(base_model="base")

    def begin(self, name: str, **options: Any) -> Adapter:
        return self.ledger.begin_adapter(LoadRequest(name=name, path="/a", **options), self.now)

    def load(self, name: str, *, polls: int = 8, **options: Any) -> PendingCall:
        adapter = self.begin(name, **options)
        call = self.ledger.stage_adapter(adapter, FILES, self.now)
        self.ledger.complete_adapter(adapter, self.now)
        self.ledger.tick(self.now)
        self.poll(polls)
        return call

    def unload(self, name: str, *, polls: int = 8) -> PendingCall:
        call = self.ledger.unload_adapter(name, self.now)
        self.ledger.tick(self.now)
        self.poll(polls)
        return call

    def restart(self) -> None:
        self.journal = compact([decode(encode(each)) for each in self.journal])
        super().restart()


def live(replica: FakeReplica) -> list[str]:
    return [each.full_name for each in replica.adapters.live.values()]


def held(replica: FakeReplica) -> list[str]:
    return [each.full_name for each in replica.adapters.held.values()]


def names(scene: AdapterScene, state: str = "live") -> list[str]:
    return [f"{each.name}@{each.version}" for each in scene.ledger.adapters() if each.state == state]


def ended(call: PendingCall) -> object:
    assert call.done and call.error is None, call.error
    return call.result
