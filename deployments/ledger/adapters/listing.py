"""What `/fleet/adapters` says of a version: which replicas have it, and how long its load took."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deployments.ledger.members import Member, PendingCall
from deployments.protocol.adapters import (
    Adapter,
    AdapterCatalog,
    AdapterStatus,
    AdapterTimings,
    LoadedAdapter,
)


@dataclass(slots=True, kw_only=True)
class LoadTimes:
    """When a load passed which point, in seconds of the ledger's clock; None: not yet.

    Nothing is decided by it.
    """

    begun: float
    staged: float | None = None  # the files are copied, and replicas are told
    stored: float | None = None  # the copy is durable
    held: float | None = None  # by all replicas that serve
    live: float | None = None  # they all let requests name it
    replicas: dict[str, LoadedAdapter] = field(default_factory=dict)

    def answered(self, call: PendingCall) -> None:
        """Take what replicas say of their part."""
        for replica_id, answer in call.answers.items():
            if isinstance(answer.value, LoadedAdapter):
                self.replicas[replica_id] = answer.value

    def timings(self) -> AdapterTimings:
        return AdapterTimings(
            copy_s=_between(self.begun, self.staged),
            sync_s=_between(self.staged, self.stored),
            load_s=_between(self.staged, self.held),
            total_s=_between(self.begun, self.live),
            replicas=dict(self.replicas),
        )


def listing(
    catalog: AdapterCatalog,
    loading: Sequence[Adapter],
    members: Sequence[Member],
    times: Mapping[int, LoadTimes],
) -> list[AdapterStatus]:
    """Every version that is known: retired ones, live ones, and those that are being loaded."""
    states = [(catalog.retired, "retired"), (catalog.live, "live"), (loading, "loading")]
    return [
        _status(each, state, members, times.get(each.adapter_id))
        for adapters, state in states
        for each in adapters
    ]


def _status(
    adapter: Adapter, state: str, members: Sequence[Member], times: LoadTimes | None
) -> AdapterStatus:
    adapter_id = adapter.adapter_id
    return AdapterStatus(
        name=adapter.name,
        version=adapter.version,
        state=state,
        path=adapter.path,
        digest=adapter.digest,
        size_bytes=adapter.size_bytes,
        replicas=tuple(each.replica_id for each in members if adapter_id in each.adapters.held),
        received=tuple(each.replica_id for each in members if adapter_id in each.adapters.received),
        timings=None if times is None else times.timings(),
    )


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin
