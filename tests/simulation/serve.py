"""What Ray Serve does: keeps the processes up, and tells routers about replicas."""

import asyncio
import tempfile
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from deployments.controller.controller import Controller
from deployments.protocol.errors import FleetUnavailable
from tests.simulation.loop import Process
from tests.simulation.oracle import Violation
from tests.simulation.publishers import HttpPublisher, Trainer
from tests.simulation.replica import Replica

if TYPE_CHECKING:
    from tests.simulation.world import World

HEALTH_S = 0.5
HUNG_S = 7.0  # a process that does not answer its health check for so long is killed
REPLACED_S = 3.0  # a controller that stands still gets a successor before it is killed
STATE = "/state"


class Serve:
    """Starts what is missing, and ends what is unhealthy."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._started = {"controller": 0, "replica": 0, "publisher": 0}

    async def run(self) -> None:
        world = self._world
        while True:
            self._keep_controller()
            self._keep_replicas()
            if world.publishes and (world.publisher is None or not world.publisher.alive):
                self._start_publisher()
            if world.controller is not None and world.controller[0].runs:
                world.oracle.has_members(world.controller[1]._ledger.status(world.loop.now).members)
            for each in world.replicas.values():
                if each.admission is not None and each.member is not None and each.process.runs:
                    each.stats = (each.member.version, each.admission.refusal() is None)
            for process, since in list(world.stopped_at.items()):
                if process.alive and process.stopped and world.loop.now - since > HUNG_S:
                    world.log("{} does not answer its health check: killed", process)
                    world.kill(process)
            await asyncio.sleep(HEALTH_S)

    def _new(self, kind: str) -> str:
        self._started[kind] += 1
        return f"{kind[0]}{self._started[kind]}"

    # -- the controller -----------------------------------------------------------------------

    def _keep_controller(self) -> None:
        world = self._world
        process = world.controller_process
        if world.controller is not None and world.controller[0] is process and process.runs:
            world.loop.spawn(process, self._check_health(process, world.controller[1]))
        stuck = (
            process is not None
            and process.stopped
            and world.loop.now - world.stopped_at[process] > REPLACED_S
        )
        if process is None or not process.alive or stuck:
            started = Process(self._new("controller"))
            world.guard(world.loop.spawn(started, self._run_controller(started)))

    async def _check_health(self, process: Process, controller: Controller) -> None:
        try:
            await controller.check_health()
        except FleetUnavailable as error:
            self._world.log("{} is unhealthy: {}", process, error)
            self._world.kill(process)

    async def _run_controller(self, process: Process) -> None:
        world = self._world
        if world.store_dir is None:
            world.store_dir = Path(tempfile.mkdtemp(prefix="simulation-"))
        try:
            controller = Controller(
                config=world.config,
                state_dir=STATE,
                store_dir=str(world.store_dir),
                is_alive=world.is_alive,
                kill=world.end,
                max_versions=2,
                poll_s=1.0,
                silent_s=1.5,
                tick_s=0.5,
                clock=world.loop.time,
                open_journal=world.disk.open,
                hold_claim=lambda directory: None,  # the kernel does not see a process of this world die
            )
        except OSError as error:  # JournalError, or the first decisions could not be written
            world.log("{} cannot start: {}", process, error)
            world.loop.kill(process)
            return
        world.controller, world.controller_process = (process, controller), process
        world.log("{} starts", process)

    # -- replicas and publishers --------------------------------------------------------------

    def _keep_replicas(self) -> None:
        world = self._world
        for name, each in list(world.replicas.items()):
            if not each.healthy:
                if each.process.alive:
                    world.log("{} is unhealthy", name)
                    if world.innocent:
                        why = None if each.member is None else each.member.fenced
                        world.violation = Violation(f"{name} was lost, and nothing was wrong with it: {why}")
                    world.kill(each.process)
                del world.replicas[name]
        while len(world.replicas) < world.count:
            replica = Replica(world, self._new("replica"))
            world.replicas[replica.name] = replica
            world.guard(world.loop.spawn(replica.process, replica.run()))

    def _start_publisher(self) -> None:
        self._world.publisher = start_publisher(self._world, self._new("publisher"))


def start_publisher(world: "World", name: str) -> Process:
    """One that publishes until it dies: a trainer, or a client over HTTP."""
    process, rng = Process(name), Random(f"{world.seed} {name}")
    handle, oracle = world.controller_handle, world.oracle
    publisher: Trainer | HttpPublisher
    if rng.random() < 0.7:
        publisher = Trainer(name, handle, oracle, rng, world.write)
    else:
        publisher = HttpPublisher(name, handle, oracle, rng)
    world.guard(world.loop.spawn(process, publisher.run()))
    return process
