"""A replica's process: what `deployments.replica.replica` does, with an engine without tensors."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from deployments.protocol.errors import ReplicaUnavailable
from deployments.protocol.poll import Directive, JoinAnswer, Report, Unloadable
from deployments.protocol.routing import Demand
from deployments.replica.follower import Follower
from deployments.replica.request_admission import RequestAdmission
from deployments.weights.store.versions import DirectoryLock
from tests.simulation.engine import FIRST, Answer, SimMember
from tests.simulation.loop import Process
from tests.simulation.oracle import Violation

if TYPE_CHECKING:
    from tests.simulation.world import World

HEARTBEAT_S = 4.5
SELF_FENCE_S = HEARTBEAT_S * 2 / 3
POLL_TIMEOUT_S = 2.0
HEALTH_CHECKS_S = 4.0  # that Serve takes to see that an engine is dead, whose process says so


class Replica:
    """One replica, from its join to its end."""

    def __init__(self, world: "World", name: str) -> None:
        self._world = world
        self.name = name
        self.process = Process(name, watched=True)
        self.member: SimMember | None = None
        self.admission: RequestAdmission | None = None
        self.follower: Follower | None = None
        self.following: asyncio.Task[None] | None = None
        self.stats: tuple[int, bool] = (0, False)
        self._dead_since: float | None = None

    async def run(self) -> None:
        world = self._world
        unloadable: Unloadable | None = None
        while True:
            try:
                handle = world.controller_handle
                ask = handle.join.remote(self.name, f"{self.name}-1", unloadable)
                answer: JoinAnswer = await asyncio.wait_for(ask, POLL_TIMEOUT_S)
            except Exception:  # the controller may start after us
                await asyncio.sleep(0.3)
                continue
            try:
                stored = answer.stored
                weights = FIRST if stored is None else world.read(stored.path, stored.version)
                reading = None if stored is None else DirectoryLock(Path(stored.path))
                break
            except (OSError, ValueError) as error:
                unloadable = Unloadable(version=answer.version, reason=str(error))
                await asyncio.sleep(0.3)
        await asyncio.sleep(world.start_s * (0.5 + world.rng.random()))
        if stored is not None:
            try:
                weights = world.read(stored.path, stored.version)
            except OSError as error:
                if stored.path not in world.tampered:
                    raise Violation(
                        f"{self.name}: version {stored.version} is being read: {error}"
                    ) from error
                world.log("{} cannot load its version: {}", self.name, error)
                world.kill(self.process)
                return
        if reading is not None:
            reading.close()
        self.member = member = SimMember(
            answer.version,
            weights,
            world.work,
            lambda version, attempt: world.oracle.went_live(self.name, version, attempt),
            world.write,
            world.read,
        )
        self.follower = Follower(
            replica_id=self.name,
            incarnation=f"{self.name}-1",
            member=self.member,
            poll=self._poll,
            heartbeat_s=0.5,
            retry_s=0.2,
            interrupt_s=2.0,
            clock=world.loop.time,
        )
        self.admission = RequestAdmission(
            self.name,
            self.member,  # type: ignore[arg-type]
            self.follower,
            self_fence_s=SELF_FENCE_S,
            engine_dead=lambda: member.dead,
            clock=world.loop.time,
        )
        self.following = asyncio.get_running_loop().create_task(self.follower.run())
        await self.following

    async def _poll(self, report: Report) -> Directive:
        fenced = report.incarnation in self._world.oracle.fenced
        directive: Directive = await asyncio.wait_for(
            self._world.controller_handle.poll.remote(report), POLL_TIMEOUT_S
        )
        if fenced and directive.admitted:
            self._world.violation = Violation(f"{report.incarnation} is admitted, the disk says it is fenced")
        return directive

    async def answer(self, demand: Demand, seconds: float) -> Answer:
        """A request that came over HTTP."""
        if self.admission is None or self.member is None:
            raise ReplicaUnavailable("not started")
        await self.admission.wait(demand)
        return await self.member.generate(seconds)

    @property
    def version(self) -> int | None:
        """Which version a request would be answered from now; None if none would."""
        if self.admission is None or self.member is None or not self.process.runs:
            return None
        if not self.member.generates or self.admission.refusal() is not None:
            return None
        since = self.member.uncertain_since
        if since is not None and self._world.loop.now > since:  # the exception is on its way
            raise Violation(f"{self.name} takes requests with weights that may be a mixture")
        return self.member.version

    @property
    def healthy(self) -> bool:
        fenced = self.member is not None and self.member.fenced is not None
        ended = self.following is not None and self.following.done()
        given_up = self._dead_since is not None and self._world.loop.now - self._dead_since > HEALTH_CHECKS_S
        return self.process.alive and not (fenced or ended or given_up)

    def lose_engine(self) -> None:
        """Its engine's processes end, and its own goes on."""
        if self.process.alive and self.member is not None and not self.member.dead:
            self._world.log("the engine of {} dies", self.name)
            self._dead_since = self._world.loop.now
            self._world.loop.spawn(self.process, self.member.die())
