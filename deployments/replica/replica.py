"""The replica: one whole vLLM server behind one Serve replica.

`__init__` returns once it serves the committed version. Exits when fenced or when its engine dies; Serve
replaces an exited process at once, an unhealthy one only seconds later.
"""

import asyncio
import os
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from deployments.calls.http_server import HttpServer
from deployments.calls.rpc import CallHandle, retried
from deployments.host.fork_server.use import warn_if_not_forked
from deployments.host.logs import serve_logger
from deployments.host.parent_death import disown_engine, own_engine
from deployments.protocol.errors import JournalError
from deployments.protocol.poll import JoinAnswer, Unloadable
from deployments.protocol.routing import ReplicaEndpoint, RoutingStats
from deployments.replica.engine_load import watch_load
from deployments.replica.follower import Follower
from deployments.replica.graceful_shutdown import shut_down
from deployments.replica.host_store import HostStore
from deployments.replica.http_front import ReplicaFront
from deployments.replica.native_member import member_of
from deployments.replica.replica_engine import ReplicaEngine
from deployments.replica.request_admission import RequestAdmission
from deployments.replica.server_arguments import EngineSpec
from deployments.replica.server_info import add_server_info
from deployments.serve.placement import take_slot, use_gpus
from deployments.serve.scaling import ScalingStats
from deployments.weights.store.initial_checkpoint import InitialCheckpoint
from deployments.weights.store.version_fetcher import require_version
from deployments.weights.store.versions import DirectoryLock

ASK_AGAIN_S = 1.0
RECORD_S = 90.0  # the controller waits for the rollouts' disk
JOIN_S = 20.0  # the controller answers `join` at once; after this, the call or answer is lost
logger = serve_logger()


async def find_first_weights(
    ask: Callable[[Unloadable | None], Awaitable[JoinAnswer]],
    initial: InitialCheckpoint,
    ask_again_s: float = ASK_AGAIN_S,
    join_s: float = JOIN_S,
) -> tuple[JoinAnswer, DirectoryLock | None]:
    """Ask until the answer is loadable, even while the controller is unreachable. Its files stay until
    unlocked. For version 0, the answer's `initial` is what the checkpoint has. Raises JournalError: the
    checkpoint is not version 0, and no replica serves that.

    Args:
        ask: the controller's `join`, idempotent; takes the version that it named and that cannot be loaded.
        initial: what version 0 is loaded from. While that is another one and others serve it, ask again.
    """
    unloadable: Unloadable | None = None
    while True:
        try:
            async with asyncio.timeout(join_s):  # not wait_for, which can swallow a cancellation
                answer = await ask(unloadable)
        except Exception as error:  # the controller may not have started yet
            logger.debug("controller not reached: %s", error)
            await asyncio.sleep(ask_again_s)
            continue
        try:
            if answer.stored is None:
                return replace(answer, initial=await asyncio.to_thread(initial.check, answer.initial)), None
            return answer, await asyncio.to_thread(require_version, answer.stored)
        except (OSError, ValueError) as error:
            found = Unloadable(version=answer.version, reason=str(error))
            if found == unloadable and answer.initial is not None and not answer.served:
                raise JournalError(str(error)) from error
            if found != unloadable:
                logger.warning("version %d is unusable, asking again: %s", answer.version, error)
            unloadable = found
            await asyncio.sleep(ask_again_s)


FAILED_REQUESTS_S = 1.0  # requests of a dead engine send their errors meanwhile


class Replica:
    """Serve's deployment of a replica.

    Args:
        self_fence_s: see `RequestAdmission`.
        slots: assigns the engine's GPUs; None: Serve did.
        cores_shared_by: replicas that share this host's cores; None on GPUs.
        store: the store's directory; with the number of versions that stay, if each host has its own.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        engine: EngineSpec,
        controller: DeploymentHandle,
        store: tuple[str, int | None],
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
        initial = InitialCheckpoint(
            engine.model, engine.arguments.get("revision"), has_files=not engine.has_dummy_weights
        )
        answer, reading = await find_first_weights(self._join, initial)
        stored = answer.stored
        spec = engine.at_commit(answer.initial) if stored is None else engine.at(stored.path)
        if cores_shared_by is not None:  # Ray gives an actor without CPUs, and its children, one thread
            os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // cores_shared_by))
        own_engine()
        warn_if_not_forked(logger)
        self._engine = await ReplicaEngine.start(spec, version=answer.version)
        if reading is not None:
            reading.close()
        if stored is None and (changed := await asyncio.to_thread(initial.changed)) is not None:
            raise RuntimeError(changed)
        add_server_info(self._engine.app, self._engine.llm.vllm_config)
        self._load = watch_load(
            *(self._engine.llm, lambda: self._engine.version),
            *(spec.min_draft_acceptance, self._engine.stop_drafting),
        )
        self._member = member_of(self._engine, spec)
        self._member.initial = answer.initial
        self._member.store = host_store = HostStore(Path(store[0]), keep=store[1])
        self._follower = Follower(
            replica_id=self._replica_id,
            incarnation=self._incarnation,
            member=self._member,
            poll=self._controller.poll.remote,
        )
        self._following = asyncio.create_task(self._follow())
        self._admission = RequestAdmission(
            self._replica_id,
            self._member,
            self._follower,
            self_fence_s=self_fence_s,
            engine_dead=lambda: self._engine.dead,
        )
        self._front = ReplicaFront(
            self._engine.app,
            replica_id=self._replica_id,
            admit=self._admission.wait,
            refusal=self._admission.refusal,
            version=lambda: self._engine.version,
            rollouts=partial(retried, self._controller, "rollouts", limit_s=RECORD_S),
            versions=None if store[1] is None else host_store,
        )
        await self._until_admitted()
        self._server = HttpServer(self._front, ray.util.get_node_ip_address())
        self._member.endpoint = ReplicaEndpoint(address=self._server.address, key=self._front.key)

    def record_replica_metadata(self) -> dict[str, Any]:
        assert self._member.endpoint is not None
        return asdict(self._member.endpoint)

    def record_routing_stats(self) -> dict[str, Any]:
        stats = RoutingStats(
            version=self._engine.version,
            admitted=self._admission.refusal() is None,
            in_flight=self._front.load,
        )
        return asdict(stats)

    def record_autoscaling_stats(self) -> dict[str, float]:
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
            raise RuntimeError("engine is dead")
        if self._following.done():
            raise RuntimeError("the follower has stopped")

    def process_id(self) -> int:
        return os.getpid()

    async def __del__(self) -> None:
        await self._leave()
        following = getattr(self, "_following", None)
        if following is not None:
            following.cancel()
        engine = getattr(self, "_engine", None)
        try:
            if engine is not None:  # idempotent: a fence stops it too
                await engine.stop()
        finally:
            disown_engine()

    async def _join(self, unloadable: Unloadable | None) -> JoinAnswer:
        return await self._controller.join.remote(self._replica_id, self._incarnation, unloadable)

    async def _until_admitted(self) -> None:
        while not self._member.admitted:
            self.check_health()
            await asyncio.sleep(0.02)

    async def _follow(self) -> None:
        await self._follower.run()
        front = getattr(self, "_front", None)
        begin = time.monotonic()
        while front is not None and front.in_flight and time.monotonic() - begin < FAILED_REQUESTS_S:
            await asyncio.sleep(0.02)
        disown_engine()
        logger.warning("exiting, Serve starts another replica: %s", self._member.fenced)
        os._exit(1)  # Ray cannot exit an actor from a background task

    async def _leave(self) -> None:
        admission, server = getattr(self, "_admission", None), getattr(self, "_server", None)
        if admission is not None:
            admission.close()
        if server is None:
            return
        await shut_down(
            self._member,
            last_contact=lambda: self._follower.last_contact,
            in_flight=lambda: self._front.in_flight,
            failed=self._has_failed,
            stop=lambda: self._front.stop(in_order=not self._has_failed()),
            send_last_report=self._send_last_report,
            application_stops=lambda: asyncio.to_thread(_application_stops),
            drain_s=self._drain_s,
        )
        await server.close()

    def _has_failed(self) -> bool:
        return self._member.fenced is not None or self._engine.dead

    async def _send_last_report(self) -> None:
        self._following.cancel()  # a later report would register it again
        await self._follower.send_last_report()


def _application_stops() -> bool:
    name = serve.get_replica_context().app_name
    application = serve.status().applications.get(name)
    return application is None or application.status == ApplicationStatus.DELETING
