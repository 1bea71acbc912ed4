"""The replica: one whole vLLM server behind one Serve replica.

It returns from `__init__` only when it serves the committed version, refuses requests that it must
not answer (so that the router tries another replica), and fails its health check once it is
fenced or its engine is dead, so that Serve replaces it.
"""

import asyncio
import contextlib
import os
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.logs import serve_logger
from deployments.placement import take_slot, use_gpus
from deployments.protocol.instructions import Directive, JoinAnswer, KvCache
from deployments.protocol.reports import Report
from deployments.replica.engine import Engine, EngineSpec
from deployments.replica.follower import Follower
from deployments.replica.gate import Gate
from deployments.replica.http_front import ReplicaFront, ReplicaServer
from deployments.replica.native_member import member_of
from deployments.replica.parent_death import own_engine
from deployments.replica_info import ReplicaEndpoint, RoutingStats
from deployments.weights.store.integrity import check_files

POLL_TIMEOUT_S = 20.0  # longer than the controller lets a poll wait
logger = serve_logger()


class Replica:
    """Serve's deployment class of the fleet's replicas.

    Args:
        engine: what the engine is started with.
        controller: the fleet's controller.
        kv_cache: what the fleet does with running requests' caches at an update.
        self_fence_s: see `Gate`.
        drain_s: how long requests that are running may go on when the replica is stopped.
        slots: where the engine's GPUs come from; None: Serve assigned this process its own.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        engine: EngineSpec,
        controller: DeploymentHandle,
        kv_cache: KvCache = KvCache.RECOMPUTE,
        self_fence_s: float = 20.0,
        drain_s: float = 10.0,
        slots: DeploymentHandle | None = None,
    ) -> None:
        self._controller = controller
        self._drain_s = drain_s
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._incarnation = uuid.uuid4().hex
        if slots is not None:
            self._slot = await take_slot(await slots.plan.remote())
            use_gpus(self._slot)
        answer = await self._join()
        if answer.path is not None:
            await asyncio.to_thread(check_files, Path(answer.path), answer.version)
        spec = engine if answer.path is None else engine.at(answer.path)
        own_engine()
        self._engine = await Engine.start(spec, version=answer.version)
        self._engine.llm.salt_prefixes = kv_cache is KvCache.KEEP
        self._member = member_of(self._engine, spec)
        self._follower = Follower(
            replica_id=self._replica_id, incarnation=self._incarnation, member=self._member, poll=self._poll
        )
        self._following = asyncio.create_task(self._follower.run())
        self._gate = Gate(
            self._replica_id,
            self._member,
            self._follower,
            self_fence_s=self_fence_s,
            engine_dead=lambda: self._engine.dead,
        )
        self._front = ReplicaFront(
            self._engine.app,
            replica_id=self._replica_id,
            gate=self._gate.wait,
            refusal=self._gate.refusal,
            version=lambda: self._engine.version,
        )
        await self._until_admitted()
        self._server = ReplicaServer(self._front, ray.util.get_node_ip_address())

    def record_replica_metadata(self) -> dict[str, Any]:
        """What Serve sends to every router when this replica becomes ready."""
        return asdict(ReplicaEndpoint(address=self._server.address, key=self._front.key))

    def record_routing_stats(self) -> dict[str, Any]:
        """What Serve sends to every router periodically."""
        stats = RoutingStats(
            version=self._engine.version,
            admitted=self._gate.refusal() is None,
            in_flight=self._front.in_flight,
        )
        return asdict(stats)

    def check_health(self) -> None:
        if self._member.fenced is not None:
            raise RuntimeError(f"fenced: {self._member.fenced}")
        if self._engine.dead:
            raise RuntimeError("the engine is dead")
        if self._following.done():
            raise RuntimeError("the follower has ended")

    def process_id(self) -> int:
        return os.getpid()

    async def __del__(self) -> None:
        gate = getattr(self, "_gate", None)
        if gate is not None:
            gate.close()
        await self._drain()
        following = getattr(self, "_following", None)
        if following is not None:
            following.cancel()
        engine = getattr(self, "_engine", None)
        if engine is not None:  # a fenced one is being stopped already
            await engine.stop()

    async def _join(self) -> JoinAnswer:
        while True:
            try:
                return await self._controller.join.remote(self._replica_id, self._incarnation)
            except Exception as error:  # the controller may start after us, or be restarting
                logger.debug("controller not reached: %s", error)
                await asyncio.sleep(1.0)

    async def _poll(self, report: Report) -> Directive:
        response = self._controller.poll.remote(report)
        try:
            return await asyncio.wait_for(response, POLL_TIMEOUT_S)
        except TimeoutError:
            with contextlib.suppress(Exception):  # nobody waits for this poll any more
                response.cancel()
            raise

    async def _until_admitted(self) -> None:
        while not self._member.admitted:
            self.check_health()
            await asyncio.sleep(0.02)

    async def _drain(self) -> None:
        """Wait for running requests. Serve cannot: they do not pass through its handles."""
        server = getattr(self, "_server", None)
        if server is None:
            return
        deadline = time.monotonic() + self._drain_s
        while self._front.in_flight and self._member.fenced is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._front.stop(in_order=self._member.fenced is None and not self._engine.dead)
        await server.close()
