"""Adapters as versions: identity, catalog, instructions, status."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

LOAD_TIMEOUT_S = 300.0  # the fleet has shorter deadlines; this one ends a call to a controller that hangs
MAX_NAME = 200
SEPARATOR = "@"  # between a name and its version


def is_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME and name.isprintable()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    name: str
    path: str
    in_place: bool = False  # vLLM's `load_inplace`: the name may be live, and gets another version
    is_3d: bool = False
    after: int | None = None  # the newest live version that the caller knows, 0 for none; None: any
    load_id: str = ""  # 32 hexadecimal digits; the call may be repeated with it
    digest: str = ""  # stated if the files never change again, see `AdapterStore.copy`


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    name: str
    version: int
    adapter_id: int  # vLLM's `lora_int_id`; never reused by a fleet
    path: str
    digest: str
    size_bytes: int
    is_3d: bool = False  # vLLM's `is_3d_lora_weight`
    load_id: str = ""

    @property
    def full_name(self) -> str:
        return f"{self.name}{SEPARATOR}{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCatalog:
    live: Sequence[Adapter] = ()  # oldest first: requests may name them
    retired: Sequence[Adapter] = ()
    last_id: int = 0
    last_versions: Mapping[str, int] = field(default_factory=dict)
    floor: int = 0  # a forgotten name has had no greater version


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    read_s: float  # checking its files and reading them in the workers, while the engine decodes
    add_s: float  # vLLM's `add_lora`, between two decoding steps


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAdapter:
    """Load it into the engine; no request may name it yet. Acknowledged with `LoadedAdapter`."""

    name: ClassVar[str] = "load_adapter"
    adapter: Adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAdapters:
    """From now on requests may name exactly these, which are all loaded.

    All others but `keep` are unloaded, each once the requests that started with it have ended.
    """

    name: ClassVar[str] = "set_adapters"
    live: Sequence[Adapter]
    keep: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    path: str
    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTimings:
    """Seconds of each part of a load; None: not finished."""

    copy_s: float | None = None  # copying the files into the fleet's store, waiting for them included
    sync_s: float | None = None  # then until the copy is durable
    load_s: float | None = None
    total_s: float | None = None  # the whole call, until requests may name it everywhere
    replicas: Mapping[str, LoadedAdapter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStatus:
    name: str
    version: int
    state: str
    path: str
    digest: str
    size_bytes: int
    replicas: Sequence[str]
    timings: AdapterTimings | None = None  # None: an earlier controller loaded it
