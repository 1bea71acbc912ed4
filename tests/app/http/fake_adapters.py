"""The controller's calls for adapters, with the ledger's rules and no files: a path exists if it is known."""

from dataclasses import replace

from deployments.ledger.adapter_catalog import (
    check_new,
    named,
    next_adapter,
    numbered,
    with_live,
    without,
    without_retired,
)
from deployments.ledger.ledger_config import AdapterLimits
from deployments.protocol.adapters import Adapter, AdapterCatalog, AdapterStatus
from deployments.protocol.errors import Conflict, NotFound


class FakeAdapters:
    """Attributes: `paths` exist; `loading` are names that are being loaded."""

    def __init__(self) -> None:
        self.paths = {"/adapters/a", "/adapters/b"}
        self.loading: set[str] = set()
        self.catalog = AdapterCatalog()

    async def _enter(self, method: str) -> None:
        """A call begins; it may fail, or the process may die."""

    def _leave(self, method: str) -> None:
        """A call is carried out; the process may die before it answers."""

    async def load_adapter(
        self,
        name: str,
        path: str,
        in_place: bool = False,
        is_3d: bool = False,
        after: int | None = None,
        load_id: str = "",
    ) -> Adapter:
        await self._enter("load_adapter")
        if name in self.loading:
            raise Conflict(f"The lora adapter '{name}' is being loaded as version 1: wait for its answer")
        check_new(self.catalog, name, base_model="base", in_place=in_place, after=after)
        if path not in self.paths:
            raise NotFound(f"lora_path: {path} does not exist")
        adapter = next_adapter(self.catalog, name, is_3d=is_3d, load_id=load_id)
        adapter = replace(adapter, path=path, digest="d", size_bytes=1)
        self.catalog = with_live(numbered(self.catalog, adapter), adapter, AdapterLimits().keep)
        self._leave("load_adapter")
        return adapter

    async def load_result(self, load_id: str) -> Adapter | None:
        return next((each for each in self.catalog.live if each.load_id == load_id), None)

    async def unload_adapter(self, name: str) -> None:
        ids = {each.adapter_id for each in named(self.catalog, name)}
        self.catalog = without_retired(without(self.catalog, ids), ids)

    async def adapters(self) -> list[AdapterStatus]:
        return [
            AdapterStatus(
                name=each.name,
                version=each.version,
                state="live",
                path=each.path,
                digest=each.digest,
                size_bytes=each.size_bytes,
                replicas=("replica-0",),
            )
            for each in self.catalog.live
        ]
