"""The replica: one whole vLLM server behind one Serve replica.

It returns from `__init__` only when it serves the committed version, refuses requests that it must
not answer (so that the router tries another replica), and ends once it is fenced, which a dead engine leads
to: Serve replaces a process that is gone at once, and an unhealthy one seconds later.
"""

import asyncio
import os
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from deployments.calls.http_server import HttpServer
from deployments.calls.rpc import CallHandle
from deployments.host.fork_server.use import warn_if_not_forked
from deployments.host.freed_memory import keeping_freed_memory
from deployments.host.logs import serve_logger
from deployments.host.parent_death import disown_engine, own_engine
from deployments.protocol.poll import JoinAnswer, Unloadable
from deployments.protocol.routing import ReplicaEndpoint, RoutingStats
from deployments.replica.engine import Engine
from deployments.replica.farewell import Farewell
from deployments.replica.follower import Follower
from deployments.replica.gate import Gate
from deployments.replica.http_front import ReplicaFront
from deployments.replica.native_member import member_of
from deployments.replica.server_arguments import EngineSpec
from deployments.replica.server_info import add_server_info, watch_load
from deployments.serve.placement import take_slot, use_gpus
from deployments.serve.scaling import ScalingStats
from deployments.weights.store.checkpoint_files import check_files

ASK_AGAIN_S = 1.0
ANSWER_S = 20.0  # of the controller, which answers at once: the question or its answer is lost
logger = serve_logger()


async def find_first_weights(
    ask: Callable[[Unloadable | None], Awaitable[JoinAnswer]],
    ask_again_s: float = ASK_AGAIN_S,
    answer_s: float = ANSWER_S,
) -> JoinAnswer:
    """Ask until the answer can be loaded. Waits for a controller that cannot be reached.

    Args:
        ask: the controller's `join`; its argument is the version that was named before and cannot be loaded.
            A question that comes again has the same answer.
        answer_s: how long one answer is waited for.
    """
    unloadable: Unloadable | None = None
    while True:
        try:
            async with asyncio.timeout(answer_s):  # not wait_for, which can swallow a cancellation
                answer = await ask(unloadable)
        except Exception as error:  # the controller may start after us, or be restarting
            logger.debug("controller not reached: %s", error)
            await asyncio.sleep(ask_again_s)
            continue
        if answer.path is None:
            return answer
        try:
            await asyncio.to_thread(
                check_files, Path(answer.path), answer.version, answer.fleet_id, answer.digest
            )
        except (OSError, ValueError) as error:
            logger.warning("another version is asked for, because the promised one is unusable: %s", error)
            unloadable = Unloadable(version=answer.version, reason=str(error))
            await asyncio.sleep(ask_again_s)
            continue
        return answer


TELL_S = 1.0  # requests of an engine that has ended are told so


class Replica:
    """Serve's deployment class of the fleet's replicas.

    Args:
        engine: what the engine is started with.
        controller: the fleet's controller.
        self_fence_s: see `Gate`.
        drain_s: how long requests that are running may go on when the replica is stopped.
        slots: where the engine's GPUs come from; None: Serve assigned this process its own.
        cores_shared_by: replicas that this host's cores are divided among; None: the engine needs no cores.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        engine: EngineSpec,
        controller: DeploymentHandle,
        self_fence_s: float = 20.0,
        drain_s: float = 10.0,
        slots: DeploymentHandle | None = None,
        cores_shared_by: int | None = None,
    ) -> None:
        self._controller = CallHandle(controller)
        self._drain_s = drain_s
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._incarnation = uuid.uuid4().hex
        if slots is not None:
            self._slot = await take_slot(await slots.plan.remote())
            use_gpus(self._slot)
        answer = await find_first_weights(self._join)
        spec = engine if answer.path is None else engine.at(answer.path)
        if cores_shared_by is not None:  # Ray allows an actor without CPUs, and its children, one thread
            os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // cores_shared_by))
            os.environ |= keeping_freed_memory()
        own_engine()
        warn_if_not_forked(logger)
        self._engine = await Engine.start(spec, version=answer.version)
        add_server_info(self._engine.app, self._engine.llm.vllm_config)
        self._load = watch_load(self._engine.llm)
        self._member = member_of(self._engine, spec)
        self._follower = Follower(
            replica_id=self._replica_id,
            incarnation=self._incarnation,
            member=self._member,
            poll=self._controller.poll.remote,
        )
        self._following = asyncio.create_task(self._follow())
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
        self._server = HttpServer(self._front, ray.util.get_node_ip_address())

    def record_replica_metadata(self) -> dict[str, Any]:
        """What Serve sends to every router when this replica becomes ready."""
        return asdict(ReplicaEndpoint(address=self._server.address, key=self._front.key))

    def record_routing_stats(self) -> dict[str, Any]:
        """What Serve sends to every router periodically."""
        stats = RoutingStats(
            version=self._engine.version,
            admitted=self._gate.refusal() is None,
            in_flight=self._front.load,
        )
        return asdict(stats)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve sends to `FleetScaling` periodically."""
        load, desired = self._load.load, self._member.desired
        stats = ScalingStats(
            running=load.running,
            waiting=load.waiting,
            places=load.places,
            kv_use=load.kv_use,
            halted=float(not self._engine.may_resume),
            wanted=float(desired.wanted or 0),
            wanted_number=float(desired.number),
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
        await self._leave()
        following = getattr(self, "_following", None)
        if following is not None:
            following.cancel()
        engine = getattr(self, "_engine", None)
        try:
            if engine is not None:  # a fenced one is being stopped already
                await engine.stop()
        finally:
            disown_engine()

    async def _join(self, unloadable: Unloadable | None) -> JoinAnswer:
        answer: JoinAnswer = await self._controller.join.remote(
            self._replica_id, self._incarnation, unloadable
        )
        return answer

    async def _until_admitted(self) -> None:
        while not self._member.admitted:
            self.check_health()
            await asyncio.sleep(0.02)

    async def _follow(self) -> None:
        """Follow the controller, until it fences this replica: then there is nothing left to do."""
        await self._follower.run()
        front = getattr(self, "_front", None)
        begin = time.monotonic()
        while front is not None and front.in_flight and time.monotonic() - begin < TELL_S:
            await asyncio.sleep(0.02)
        disown_engine()
        logger.warning("this replica ends, and Serve starts another: %s", self._member.fenced)
        os._exit(1)  # Ray has no call that ends an actor from one of its tasks in the background

    async def _leave(self) -> None:
        """Wait for running requests, which Serve cannot: they do not pass through its handles."""
        gate, server = getattr(self, "_gate", None), getattr(self, "_server", None)
        if gate is not None:
            gate.close()
        if server is None:
            return
        farewell = Farewell(
            self._member,
            last_contact=lambda: self._follower.last_contact,
            in_flight=lambda: self._front.in_flight,
            failed=self._has_failed,
            stop=lambda: self._front.stop(in_order=not self._has_failed()),
            goodbye=self._goodbye,
            fleet_ends=lambda: asyncio.to_thread(_application_ends),
            drain_s=self._drain_s,
        )
        await farewell.run()
        await server.close()

    def _has_failed(self) -> bool:
        return self._member.fenced is not None or self._engine.dead

    async def _goodbye(self) -> None:
        self._following.cancel()  # a later report would register it again
        await self._follower.goodbye()


def _application_ends() -> bool:
    """Whether Serve stops the whole application, and not this replica alone."""
    name = serve.get_replica_context().app_name
    application = serve.status().applications.get(name)
    return application is None or application.status == ApplicationStatus.DELETING
