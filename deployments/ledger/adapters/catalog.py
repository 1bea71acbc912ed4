"""The catalog of adapters: names, numbers and retention. Every change makes a new catalog.

A version number is never given twice for a name, and an id never at all: an engine finds KV cache blocks by
the adapter's full name, and two sets of weights under one would share them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import BaseModel, ConfigDict, Field

from deployments.ledger.members import Member, PendingCall
from deployments.protocol.adapters import (
    Adapter,
    AdapterCatalog,
    AdapterFiles,
    AdapterStatus,
    AdapterTimings,
    LoadedAdapter,
)
from deployments.protocol.errors import Conflict, InvalidRequest, NotFound

REMEMBERED = 256  # names whose last number is known; those before them share the greatest of theirs
MAX_NAME = 200
SEPARATOR = "@"  # of a name and its version, see `Adapter.full_name`


class AdapterLimits(BaseModel):
    """What a fleet allows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keep: int = Field(default=2, ge=1)  # versions of one name
    most: int = Field(default=128, ge=1)  # live versions of all names
    base_model: str = ""  # a name that no adapter can have
    refusal: str | None = None  # why there are no adapters


def is_name(name: str) -> bool:
    """Whether an adapter can have this name, unless the base model has it."""
    return 0 < len(name) <= MAX_NAME and name.isprintable()


def check_name(name: str, base_model: str) -> None:
    """Raises InvalidRequest for a name that no adapter can have."""
    if not is_name(name):
        raise InvalidRequest(f"lora_name: expected 1 to {MAX_NAME} printable characters, got {name[:60]!r}")
    if name == base_model:
        raise InvalidRequest(f"The lora adapter '{name}' conflicts with a served base model.")


def check_free(catalog: AdapterCatalog, name: str) -> None:
    """Raises InvalidRequest for the full name of a live version. Clients may number names themselves (ART
    loads `run@7`): only what would stand for two adapters is refused."""
    found = next((each for each in catalog.live if each.full_name == name), None)
    if found is not None:
        raise InvalidRequest(
            f"The lora adapter '{name}' is version {found.version} of '{found.name}', which does not change: "
            f"load '{found.name}', or another name",
            {"lora_name": name},
        )


def named(catalog: AdapterCatalog, name: str) -> list[Adapter]:
    """The live versions of a name, oldest first; of a full name the one version.

    Raises:
        NotFound: there is none.
    """
    found = [each for each in catalog.live if name in (each.name, each.full_name)]
    if not found:
        raise NotFound(f"The lora adapter '{name}' cannot be found.", {"lora_name": name})
    return found


def check_newest(catalog: AdapterCatalog, name: str, after: int | None) -> None:
    """Raises Conflict if the newest live version of a name is not `after` (0: there is none; None: any)."""
    newest = max((each.version for each in catalog.live if each.name == name), default=0)
    if after is not None and newest != after:
        raise Conflict(
            f"The lora adapter '{name}' is at version {newest}, expected {after}: somebody has changed it",
            {"lora_name": name, "version": newest, "expected": after},
        )


def next_adapter(
    catalog: AdapterCatalog, name: str, *, is_3d: bool, load_id: str = "", taken: Collection[str] = ()
) -> Adapter:
    """The next version of a name, without its files.

    Args:
        taken: names that its full name cannot be, beside those of live adapters.
    """
    others = {*taken, *(each.name for each in catalog.live)}
    version = catalog.last_versions.get(name, catalog.floor) + 1
    while f"{name}{SEPARATOR}{version}" in others:
        version += 1
    return Adapter(
        name=name,
        version=version,
        adapter_id=catalog.last_id + 1,
        path="",
        digest="",
        size_bytes=0,
        is_3d=is_3d,
        load_id=load_id,
    )


def numbered(catalog: AdapterCatalog, adapter: Adapter) -> AdapterCatalog:
    """The catalog in which this adapter's numbers are used."""
    last = {name: number for name, number in catalog.last_versions.items() if name != adapter.name}
    last[adapter.name] = adapter.version
    floor = catalog.floor
    while len(last) > REMEMBERED:
        floor = max(floor, last.pop(next(iter(last))))
    return replace(catalog, last_id=max(catalog.last_id, adapter.adapter_id), last_versions=last, floor=floor)


def with_files(adapter: Adapter, files: AdapterFiles) -> Adapter:
    return replace(adapter, path=files.path, digest=files.digest, size_bytes=files.size_bytes)


def with_live(catalog: AdapterCatalog, adapter: Adapter, keep: int) -> AdapterCatalog:
    """The adapter is live; of its name only the newest `keep` versions stay."""
    own = [each for each in catalog.live if each.name == adapter.name]
    out = {each.adapter_id for each in own[: max(0, len(own) + 1 - keep)]}
    grown = replace(catalog, live=(*catalog.live, adapter))
    return without(grown, out)


def without(catalog: AdapterCatalog, ids: set[int]) -> AdapterCatalog:
    """These are live no more."""
    return replace(
        catalog,
        live=tuple(each for each in catalog.live if each.adapter_id not in ids),
        retired=(*catalog.retired, *(each for each in catalog.live if each.adapter_id in ids)),
    )


def without_retired(catalog: AdapterCatalog, ids: set[int]) -> AdapterCatalog:
    """These are on no replica any more, and their files may go."""
    return replace(catalog, retired=tuple(each for each in catalog.retired if each.adapter_id not in ids))


def check_room(catalog: AdapterCatalog, loading: Mapping[str, object], limits: AdapterLimits) -> None:
    """Raises Conflict if there are as many live versions as there may be."""
    if len(catalog.live) + len(loading) >= limits.most:
        raise Conflict(
            f"{limits.most} versions of adapters are live or being loaded, which is the limit: "
            "unload some first",
            {"most": limits.most},
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
