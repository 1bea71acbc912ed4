"""The immutable catalog of adapters: names, numbers, retention.

Numbers and ids are never reused: an engine finds KV cache blocks by the adapter's full name.
"""

from collections.abc import Collection
from dataclasses import replace

from deployments.protocol.adapters import MAX_NAME, SEPARATOR, Adapter, AdapterCatalog, LoadRequest, is_name
from deployments.protocol.errors import Conflict, InvalidRequest, NotFound

REMEMBERED = 256  # names with a known last number; older names share the greatest of theirs


def check_new(catalog: AdapterCatalog, request: LoadRequest, base_model: str) -> None:
    """Refuses only names that would stand for two adapters: clients may number names themselves (ART loads
    `run@7`).

    Raises:
        InvalidRequest: no such name is possible, or it is live and `in_place` is false.
        Conflict: the newest live version is not `after`.
    """
    name, after = request.name, request.after
    if not is_name(name):
        raise InvalidRequest(f"lora_name: expected 1 to {MAX_NAME} printable characters, got {name[:60]!r}")
    if name == base_model:
        raise InvalidRequest(f"The lora adapter '{name}' conflicts with a served base model.")
    found = next((each for each in catalog.live if each.full_name == name), None)
    if found is not None:
        raise InvalidRequest(
            f"The lora adapter '{name}' is version {found.version} of '{found.name}', which does not change: "
            f"load '{found.name}', or another name",
            {"lora_name": name},
        )
    newest = max((each.version for each in catalog.live if each.name == name), default=0)
    if newest and not request.in_place:
        raise InvalidRequest(
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
            "place, set 'load_inplace' to True.",
            {"lora_name": name},
        )
    if after is not None and newest != after:
        raise Conflict(
            f"The lora adapter '{name}' is at version {newest}, expected {after}: somebody has changed it",
            {"lora_name": name, "version": newest, "expected": after},
        )


def named(catalog: AdapterCatalog, name: str) -> list[Adapter]:
    """A name's live versions, oldest first; a full name's one version. Raises NotFound."""
    found = [each for each in catalog.live if name in (each.name, each.full_name)]
    if not found:
        raise NotFound(f"The lora adapter '{name}' cannot be found.", {"lora_name": name})
    return found


def next_adapter(catalog: AdapterCatalog, request: LoadRequest, taken: Collection[str] = ()) -> Adapter:
    """The next version, without files; `taken`: names that its full name cannot be."""
    name, others = request.name, {*taken, *(each.name for each in catalog.live)}
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
        is_3d=request.is_3d,
        load_id=request.load_id,
    )


def numbered(catalog: AdapterCatalog, adapter: Adapter) -> AdapterCatalog:
    last = {name: number for name, number in catalog.last_versions.items() if name != adapter.name}
    last[adapter.name] = adapter.version
    floor = catalog.floor
    while len(last) > REMEMBERED:
        floor = max(floor, last.pop(next(iter(last))))
    return replace(catalog, last_id=max(catalog.last_id, adapter.adapter_id), last_versions=last, floor=floor)


def with_live(catalog: AdapterCatalog, adapter: Adapter, keep: int) -> AdapterCatalog:
    own = [each for each in catalog.live if each.name == adapter.name]
    out = {each.adapter_id for each in own[: max(0, len(own) + 1 - keep)]}
    return without(replace(catalog, live=(*catalog.live, adapter)), out)


def without(catalog: AdapterCatalog, ids: set[int]) -> AdapterCatalog:
    return replace(
        catalog,
        live=tuple(each for each in catalog.live if each.adapter_id not in ids),
        retired=(*catalog.retired, *(each for each in catalog.live if each.adapter_id in ids)),
    )


def without_retired(catalog: AdapterCatalog, ids: set[int]) -> AdapterCatalog:
    return replace(catalog, retired=tuple(each for each in catalog.retired if each.adapter_id not in ids))
