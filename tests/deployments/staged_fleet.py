"""A fleet in one process whose replicas stage for real: routes, controller, followers, members, staging,
vLLM's worker and its reload. What is left out is vLLM's scheduler, and processes.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import torch
from fastapi import FastAPI
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient
from vllm.v1.serial_utils import MsgpackEncoder

from app.http.auth import Guard
from app.http.ingress import build_app
from deployments.controller.controller import Controller
from deployments.protocol.ledger_config import LedgerConfig
from deployments.replica.follower import Follower
from deployments.replica.host_store import HostStore
from deployments.replica.member import StagedMember
from tests.app.http.fake_controller import Handle
from tests.app.http.serving import FakeRouter, no_metrics, tokens
from tests.deployments.replica.fake_vllm import FakeEngine, FakeLlm
from tests.deployments.weights.staging.memory_worker import MemoryWorker, write_checkpoint
from tests.deployments.weights.transports.vllm_trainer import CpuIpc, CpuNccl
from tests.waiting import reached

LIMIT_S = 30.0


class WireWorker(MemoryWorker):
    """The only worker of its replica; receives vLLM's own wire."""

    def __init__(self, checkpoint: Path, kind: type[Any]) -> None:
        super().__init__(checkpoint)
        self.vllm_config.parallel_config.world_size = 1
        self.weight_transfer_engine = kind(
            SimpleNamespace(), self.vllm_config, torch.device("cpu"), self.model
        )


class WorkerLlm(FakeLlm):
    """Calls go to a real worker, and nothing is scheduled."""

    def __init__(self, worker: WireWorker) -> None:
        super().__init__()
        self._worker = worker

    async def collective_rpc(self, method: str, kwargs: Any = None) -> list[Any]:
        MsgpackEncoder().encode((method, kwargs))  # what vLLM cannot send to its engine fails here
        return [await asyncio.to_thread(getattr(self._worker, method), **kwargs or {})]


class StagedReplica:
    """A replica that follows the controller."""

    def __init__(
        self, name: str, checkpoint: Path, kind: type[Any], controller: Controller, store: Path
    ) -> None:
        self.worker = WireWorker(checkpoint, kind)
        self.engine = FakeEngine(WorkerLlm(self.worker), FastAPI(), 0)  # type: ignore[arg-type]
        self.member = StagedMember(self.engine)
        self.member.store = HostStore(store, keep=None)
        follower = Follower(
            replica_id=name,
            incarnation=f"{name}-1",
            member=self.member,
            poll=controller.poll,
            heartbeat_s=0.1,
            retry_s=0.05,
        )
        self._following = asyncio.create_task(follower.run())

    async def end(self) -> None:
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        self.engine.calls.close()
        await asyncio.to_thread(self.worker.weight_transfer_engine.shutdown)


class StagedFleet:
    """The controller with its replicas, and its address for an outside publisher.

    Directories below `directory` can be published.
    """

    def __init__(self, directory: Path, wire: str) -> None:
        self._kind: type[Any] = CpuIpc if wire.startswith("ipc") else CpuNccl
        self.checkpoint = write_checkpoint(directory / "model")
        self._store = directory / "store"
        self.replicas: dict[str, StagedReplica] = {}
        self.controller = Controller(
            config=LedgerConfig(min_replicas=1),
            state_dir=str(directory / "state"),
            store_dir=str(self._store),
            is_alive=lambda replica_id: True,
            kill=lambda replica_id: None,
            poll_s=0.05,
            silent_s=0.5,
            tick_s=0.02,
        )
        handle: Any = Handle(self.controller)
        app = build_app(
            Guard(tokens()),
            FakeRouter(),
            handle,
            scrape=no_metrics,
            checkpoint_roots=[directory],
            allow_pickled_ipc=True,
        )
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False),
            base_url="http://fleet",
            timeout=60,
        )

    async def start(self, *names: str) -> None:
        for name in names:
            self.replicas[name] = replica = StagedReplica(
                name, self.checkpoint, self._kind, self.controller, self._store
            )
            await replica.engine.calls.connect()
        await reached(lambda: all(replica.member.admitted for replica in self.replicas.values()))

    def client(self) -> HTTPVLLMWeightSyncClient:
        """vLLM's own client. For a thread: it waits."""
        http, loop = self.http, asyncio.get_running_loop()

        class Client(HTTPVLLMWeightSyncClient):
            def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
                posting = asyncio.run_coroutine_threadsafe(http.post(f"/{path}", json=json), loop)
                posting.result(2 * LIMIT_S).raise_for_status()

        return Client("http://fleet")

    async def aclose(self) -> None:
        for replica in self.replicas.values():
            await replica.end()
        await self.http.aclose()
        await self.controller.aclose()


@asynccontextmanager
async def staged_fleet(directory: Path, wire: str, *names: str) -> AsyncIterator[StagedFleet]:
    fleet = StagedFleet(directory, wire)
    try:
        await fleet.start(*names)
        yield fleet
    finally:
        await fleet.aclose()
