"""Adapters as versions: what an adapter is, which ones there are, and what a replica has of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One version of an adapter. Nothing of it ever changes."""

    name: str
    version: int  # of this name; never given twice
    adapter_id: int  # vLLM's `lora_int_id`; never given twice by a fleet
    path: str  # the fleet's own copy of its files
    digest: str  # of its files
    size_bytes: int
    is_3d: bool = False  # vLLM's `is_3d_lora_weight`
    load_id: str = ""  # its caller's name for the load

    @property
    def full_name(self) -> str:
        """What the engine, and an answer, call it."""
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCatalog:
    """The adapters of a fleet, as they are durable."""

    live: Sequence[Adapter] = ()  # oldest first: requests may name them
    retired: Sequence[Adapter] = ()  # no request begins with them; a replica may still have them
    last_id: int = 0
    last_versions: Mapping[str, int] = field(default_factory=dict)  # of the names used last, oldest first
    floor: int = 0  # no name that is not remembered has had a greater version


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterState:
    """What a replica says of its adapters in each report, by `adapter_id`."""

    held: Sequence[int] = ()  # its engine can use them
    live: Sequence[int] = ()  # requests may name them
    received: Sequence[int] = ()  # of those it holds, loaded from what a transport brought


NO_ADAPTERS = AdapterState()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """How long one replica took to load a version."""

    read_s: float  # to check its files and to have the workers read them, while the engine decodes
    add_s: float  # vLLM's `add_lora`, between two decoding steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveAdapter:
    """Receive an adapter's two files over the publisher's connection, for the load with this `load_id`.

    Rejected, or failed: the load reads the fleet's copy.
    """

    name: ClassVar[str] = "receive_adapter"
    load_id: str
    payload: JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAdapter:
    """Load it into the engine; no request may name it yet. Acknowledged with `LoadedAdapter`.

    Rejected: the files are not what is expected.
    """

    name: ClassVar[str] = "load_adapter"
    adapter: Adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAdapters:
    """Requests may name exactly these from now on; all of them are loaded.

    One that was live and is not among them is unloaded once the requests that began with it have ended.
    """

    name: ClassVar[str] = "set_adapters"
    live: Sequence[Adapter]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropAdapter:
    """Unload one that never became live here, or that no ledger knows."""

    name: ClassVar[str] = "drop_adapter"
    adapter_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """The fleet's copy of an adapter."""

    path: str
    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTimings:
    """How long the parts of a load took, in seconds; None: not over."""

    copy_s: float | None  # the files into the fleet's store, waiting for them included
    sync_s: float | None  # then: until the copy is durable
    load_s: float | None  # beside that: until all replicas hold it
    total_s: float | None  # from the call until requests may name it everywhere
    replicas: Mapping[str, LoadedAdapter]  # each one's part of `load_s`


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStatus:
    """One entry of `/fleet/adapters`."""

    name: str
    version: int
    state: str  # loading | live | retired
    path: str
    digest: str
    size_bytes: int
    replicas: Sequence[str]  # that have it
    received: Sequence[str] = ()  # of these, which loaded what a transport brought; others the fleet's copy
    timings: AdapterTimings | None = None  # None: an earlier controller loaded it
