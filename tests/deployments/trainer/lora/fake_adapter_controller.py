"""A fake controller that keeps adapters as the real one does: its catalog, and the fleet's own copies."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deployments.errors import Conflict, InvalidRequest, SlipstreamError
from deployments.ledger.adapters.catalog import (
    AdapterLimits,
    check_name,
    check_newest,
    named,
    next_adapter,
    numbered,
    with_files,
    with_live,
    without,
)
from deployments.protocol.adapters import Adapter, AdapterCatalog, AdapterStatus
from deployments.weights.store.adapter_bytes import adapter_digest
from deployments.weights.store.adapter_store import AdapterStore
from tests.deployments.fake_controller import FakeController


class FakeAdapterController(FakeController):
    """Attributes: `roots` are where adapters may be; `refusal` is raised by the next load, after the copy."""

    def __init__(self, store: Path, *roots: Path) -> None:
        super().__init__()
        self.roots = roots
        self.refusal: SlipstreamError | None = None
        self.catalog = AdapterCatalog()
        self._files = AdapterStore(store / "adapters")
        self.sent: dict[str, dict[str, bytes]] = {}  # by the load that it is for
        self.transfer_error: Exception | None = None  # of every transfer

    @property
    def live(self) -> list[str]:
        return [each.full_name for each in self.catalog.live]

    def files(self, name: str) -> Path:
        """The fleet's copy of the newest version of a name."""
        return Path(named(self.catalog, name)[-1].path)

    def on_load_adapter(
        self,
        name: str,
        path: str,
        in_place: bool = False,
        is_3d: bool = False,
        after: int | None = None,
        load_id: str = "",
        digest: str = "",
    ) -> Adapter:
        check_name(name, "base")
        if not in_place and any(each.name == name for each in self.catalog.live):
            raise InvalidRequest(f"The lora adapter '{name}' has already been loaded.")
        check_newest(self.catalog, name, after)
        adapter = next_adapter(self.catalog, name, is_3d=is_3d, load_id=load_id)
        self.catalog = numbered(self.catalog, adapter)
        files = self._files.copy(Path(path), self.roots, adapter.adapter_id, digest)
        assert files.digest == adapter_digest(Path(files.path)), "replicas would reject it"
        adapter = with_files(adapter, files)
        self._files.complete(adapter.adapter_id)
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal
        self.catalog = with_live(self.catalog, adapter, AdapterLimits().keep)
        return adapter

    def on_send_adapter(self, token: int, load_id: str, payload: Mapping[str, Any]) -> None:
        if self.on_renew(token).publisher != self.connected_to:
            raise Conflict("connect before", {"connect_again": True})
        if self.transfer_error is not None:
            raise self.transfer_error
        self.receive(payload)
        self.sent[load_id] = {name: each.numpy().tobytes() for name, each in self.received.items()}

    def on_unload_adapter(self, name: str) -> None:
        self.catalog = without(self.catalog, {each.adapter_id for each in named(self.catalog, name)})

    def on_adapters(self) -> list[AdapterStatus]:
        return [
            AdapterStatus(
                name=each.name,
                version=each.version,
                state=state,
                path=each.path,
                digest=each.digest,
                size_bytes=each.size_bytes,
                replicas=("r0",),
            )
            for adapters, state in ((self.catalog.retired, "retired"), (self.catalog.live, "live"))
            for each in adapters
        ]
