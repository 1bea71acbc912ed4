"""A replica that gives a version of its host's store to others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from deployments.calls.http_server import HttpServer
from deployments.protocol.poll import StoredVersion
from deployments.protocol.routing import ReplicaEndpoint
from deployments.replica.http_front import ReplicaFront
from deployments.weights.store.owner import own
from deployments.weights.store.version_writer import CommittedVersion, write_version
from deployments.weights.store.versions import Store

FLEET, VERSION = "a-fleet", 7
TENSORS = {"b": torch.arange(3 << 17, dtype=torch.float32), "a": torch.ones(5)}
WEIGHTS = "model.safetensors"


def write(
    directory: Path,
    tensors: dict[str, torch.Tensor] = TENSORS,
    version: int = VERSION,
    fleet_id: str = FLEET,
) -> Path:
    committed = CommittedVersion(version=version, label=None, fleet_id=fleet_id, tensors=tensors)
    own(directory, fleet_id)
    return write_version(committed, Store(directory), lambda made: (made / "config.json").write_text("{}"))


def told(store: Path, source: Path, *holders: ReplicaEndpoint) -> StoredVersion:
    """What the controller says to a replica with this store of a version that was committed as in the
    source."""
    return StoredVersion(
        version=VERSION,
        path=str(store / f"v{VERSION:08d}"),
        fleet_id=FLEET,
        digest=Store(source).manifest_of(VERSION).digest,
        holders=holders,
    )


@asynccontextmanager
async def holder(store: Any) -> AsyncIterator[ReplicaEndpoint]:
    """A replica with this store, which may be any ASGI application."""

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("not for the engine")

    front = ReplicaFront(
        engine,
        replica_id="r0",
        admit=lambda demand: asyncio.sleep(0),
        refusal=lambda: None,
        version=lambda: VERSION,
        versions=store,
    )
    server = HttpServer(front, "127.0.0.1")
    try:
        yield ReplicaEndpoint(address=server.address, key=front.key)
    finally:
        await server.close()
