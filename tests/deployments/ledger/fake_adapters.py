"""The adapters of a replica without an engine: held, named by requests, in use."""

from collections import Counter
from dataclasses import dataclass, field

from deployments.protocol.adapters import Adapter, AdapterState, LoadedAdapter


@dataclass(slots=True)
class FakeAdapters:
    """What `deployments.replica.adapters` does, with nothing to load."""

    held: dict[int, Adapter] = field(default_factory=dict)
    live: dict[int, Adapter] = field(default_factory=dict)
    used: Counter[int] = field(default_factory=Counter)  # by requests that run
    doomed: set[int] = field(default_factory=set)
    arrived: str = ""  # the load that a transport has brought files for
    received: list[int] = field(default_factory=list)  # loaded from that

    def state(self) -> AdapterState:
        return AdapterState(held=tuple(self.held), live=tuple(self.live), received=tuple(self.received))

    def load(self, adapter: Adapter) -> LoadedAdapter:
        self.held[adapter.adapter_id] = adapter
        if self.arrived and adapter.load_id == self.arrived:
            self.arrived = ""
            self.received.append(adapter.adapter_id)
        self.doomed.discard(adapter.adapter_id)
        return LoadedAdapter(read_s=0.25, add_s=0.125)

    def set(self, live: list[Adapter]) -> None:
        missing = [each.full_name for each in live if each.adapter_id not in self.held]
        if missing:
            raise RuntimeError(f"{missing} are not loaded")
        self.doomed |= set(self.live) - {each.adapter_id for each in live}
        self.live = {each.adapter_id: each for each in live}
        self._remove()

    def drop(self, adapter_id: int) -> None:
        assert adapter_id not in self.live, "requests may name it"
        self.doomed.add(adapter_id)
        self._remove()

    def begin(self, name: str) -> int:
        """A request names an adapter; the id of the version that answers it."""
        [*_, newest] = [each for each in self.live.values() if name in (each.name, each.full_name)]
        self.used[newest.adapter_id] += 1
        return newest.adapter_id

    def end(self, adapter_id: int) -> None:
        assert adapter_id in self.held, "unloaded under a running request"
        self.used[adapter_id] -= 1
        self._remove()

    def _remove(self) -> None:
        for adapter_id in [each for each in self.doomed if not self.used[each]]:
            self.held.pop(adapter_id, None)
            self.doomed.discard(adapter_id)
