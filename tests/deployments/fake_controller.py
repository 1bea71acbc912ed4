"""A controller handle without a fleet: takes rounds in, opens what a transport sends, and commits."""

from collections.abc import Mapping
from typing import Any

import torch

from deployments.errors import InvalidRequest, RoundAborted
from deployments.protocol import Lease, RoundOptions, RoundReport
from deployments.weights.transports.shm import open_segment
from deployments.weights.wire.chunk_layout import parse, plan_chunks


class FakeController:
    """Stands where a `DeploymentHandle` does: `handle.method.remote(...).result()`, or awaited."""

    def __init__(self) -> None:
        self.version = 0
        self.epoch = 1
        self.calls: list[str] = []
        self.received: dict[str, torch.Tensor] = {}
        self.stored_versions: dict[int, str] = {}
        self.abort_next: RoundAborted | None = None
        self.connected_to: str | None = None
        self.holder = ""

    def __getattr__(self, name: str) -> "_Method":
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(self, name)

    def answer(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        return getattr(self, f"on_{method}")(*args)

    def on_fleet(self) -> dict[str, Any]:
        connection = None if self.connected_to is None else {"publisher": self.connected_to}
        stored = max(self.stored_versions, default=None)
        return {
            "epoch": self.epoch,
            "workers": 1,
            "committed_version": self.version,
            "stored_version": stored,
            "members": [],
            "connection": connection,
        }

    def on_acquire(self, publisher: str) -> Lease:
        self.holder = publisher
        return Lease(publisher=publisher, token=1, duration_s=60.0)

    def on_renew(self, token: int) -> Lease:
        return self.on_acquire(self.holder)

    def on_release(self, token: int) -> None:
        pass

    def on_connect(self, token: int, init_info: Mapping[str, Any]) -> int:
        self.connected_to = self.holder
        return 1

    def on_open_round(self, token: int, manifest: object, options: RoundOptions) -> int:
        self.received = {}
        return self.version + 1

    def on_send(self, token: int, round_id: int, payload: Mapping[str, Any]) -> None:
        (chunk,) = plan_chunks(
            parse(payload["names"], payload["dtype_names"], payload["shapes"]), chunk_bytes=1 << 62
        )
        block = open_segment(payload["segment"], chunk.size_bytes)
        for entry in chunk.entries:
            data = block[entry.offset : entry.offset + entry.size_bytes].clone()
            self.received[entry.name] = data.view(entry.dtype).reshape(entry.shape)

    def on_close_round(self, token: int, round_id: int, manifest: object, label: str | None) -> RoundReport:
        if self.abort_next is not None:
            error, self.abort_next = self.abort_next, None
            raise error
        self.version += 1
        return RoundReport(
            round_id=round_id,
            version=self.version,
            label=label,
            epoch=self.epoch,
            phase="committed",
            reason="",
            duration_s=0.0,
        )

    def on_abort_round(self, token: int, round_id: int, reason: str) -> None:
        pass

    def on_stored(self, version: int, path: str, label: str | None) -> None:
        self.stored_versions[version] = path

    def on_rollback_source(self, version: int) -> str:
        if version not in self.stored_versions:
            raise InvalidRequest(f"version {version} is not in the store")
        return self.stored_versions[version]


class _Method:
    def __init__(self, controller: FakeController, name: str) -> None:
        self._controller = controller
        self._name = name

    def remote(self, *args: Any) -> "_Response":
        return _Response(lambda: self._controller.answer(self._name, *args))


class _Response:
    def __init__(self, call: Any) -> None:
        self._call = call

    def result(self, timeout_s: float | None = None) -> Any:
        return self._call()

    def __await__(self) -> Any:
        return self._call()
        yield
