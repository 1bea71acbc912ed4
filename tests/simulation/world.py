"""One schedule: the real controller, followers, gates and lease on simulated processes, with faults."""

import asyncio
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from deployments.controller.controller import Controller
from deployments.protocol.engine_state import InFlight
from deployments.protocol.ledger_config import LedgerConfig
from deployments.protocol.poll import CommitMode
from deployments.weights.store.versions import MANIFEST, VersionManifest
from tests.simulation.disk import SimDisk
from tests.simulation.engine import Work
from tests.simulation.loop import OUTSIDE, Loop, Process
from tests.simulation.network import Handle, Network
from tests.simulation.oracle import Oracle, Violation
from tests.simulation.publishers import one_request
from tests.simulation.replica import HEARTBEAT_S, Replica
from tests.simulation.serve import Serve


class World:
    """Everything of one schedule.

    Args:
        seed: decides everything.
        trace: collects what happened, in words.
    """

    def __init__(self, seed: int, *, trace: bool = False, replicas: int | None = None) -> None:
        self.seed = seed
        self.trace: list[str] | None = [] if trace else None
        random.seed(seed)  # the router's policy draws from it
        self.rng = Random(f"{seed} world")
        self.loop = Loop(self._on_disk_thread, self._check)
        self.network = Network(self.loop, Random(f"{seed} network"), self.log)
        self.work = Work(Random(f"{seed} work"))
        mode = CommitMode.ROLLING if self.rng.random() < 0.25 else CommitMode.TOGETHER
        self.count = replicas or self.rng.choice([2, 3, 3])
        self.config = LedgerConfig(
            min_replicas=self.rng.choice([1, 1, 2]) if self.count > 2 else 1,
            max_unavailable=1,
            heartbeat_timeout_s=HEARTBEAT_S,
            stage_timeout_s=6.0,
            commit_timeout_s=5.0,
            call_timeout_s=5.0,
            catch_up_timeout_s=8.0,
            grace_s=1.0,
            lease_s=8.0,
            drain_timeout_s=3.0,
            in_flight=self.rng.choice([InFlight.KEEP, InFlight.KEEP, InFlight.KEEP, InFlight.WAIT]),
            commit=mode,
        )
        self.start_s = self.rng.choice([0.3, 2.0])
        self.oracle = Oracle(self.loop.time, mode, self._serving, self.log)
        self.disk = SimDisk(Random(f"{seed} disk"), self.oracle.synced)
        self.controller: tuple[Process, Controller] | None = None
        self.controller_process: Process | None = None
        self.controller_handle = Handle(self.network, lambda: self.controller)
        self.replicas: dict[str, Replica] = {}
        self.publisher: Process | None = None
        self.stopped_at: dict[Process, float] = {}
        self.lookups_hang = False
        self.publishes = True  # whether a publisher that died gets a successor
        self.damaged = False  # engines may find good files damaged
        self.innocent = False  # no replica may be lost: nothing is wrong with any
        self.disk_jobs: list[tuple[Process, Callable[[], Any]]] = []
        self.violation: Violation | None = None
        self.store_dir: Path | None = None
        self.stored: dict[str, tuple[int, str]] = {}
        self.tampered: set[str] = set()  # paths that somebody else removed

    def log(self, text: str, *args: Any) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.loop.now:9.4f} {text.format(*args)}")

    # -- the run ------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Whether it came true in time. Raises Violation."""
        return self.loop.run_until(until, limit_s)

    def start(self) -> None:
        self.guard(self.loop.spawn(OUTSIDE, Serve(self).run()))
        self.loop.spawn(Process("client", watched=False), self._requests())

    def close(self) -> None:
        self.loop.close()
        if self.store_dir is not None:
            shutil.rmtree(self.store_dir, ignore_errors=True)

    def _check(self) -> None:
        self.oracle.check()
        if self.violation is not None:
            raise self.violation
        if self.loop.errors:
            raise Violation(self.loop.errors[0])

    def _serving(self) -> list[tuple[str, int]]:
        return [(name, v) for name, each in self.replicas.items() if (v := each.version) is not None]

    def guard(self, task: asyncio.Task[Any]) -> None:
        """What a process raises that must not raise ends the schedule."""

        def ended(done: asyncio.Task[Any]) -> None:
            if not done.cancelled() and isinstance(done.exception(), Violation):
                self.violation = done.exception()  # type: ignore[assignment]

        task.add_done_callback(ended)

    # -- processes ----------------------------------------------------------------------------

    def kill(self, process: Process) -> None:
        self.log("{} dies", process)
        self.network.fail_calls_to(process)
        jobs = [action for owner, action in self.disk_jobs if owner is process]
        self.disk_jobs = [each for each in self.disk_jobs if each[0] is not process]
        if jobs and self.rng.random() < 0.5:  # in the middle of a write
            self.disk.dying = True
            try:
                jobs[0]()
            except Exception as error:
                self.log("{} dies while it writes: {}", process, error)
            self.disk.dying = False
        self.loop.kill(process)
        self.stopped_at.pop(process, None)

    def stop(self, process: Process) -> None:
        self.log("{} stands still", process)
        self.loop.stop(process)
        self.stopped_at[process] = self.loop.now

    def go_on(self, process: Process) -> None:
        if process.alive and process.stopped:
            self.log("{} goes on", process)
            self.stopped_at.pop(process, None)
            self.loop.go_on(process)

    def at_full_strength(self, version: int) -> bool:
        """Whether every replica serves the newest version, and that is at least this one."""
        newest = self.oracle.durable
        return (
            newest >= version
            and len(self.replicas) == self.count
            and all(each.version == newest for each in self.replicas.values())
        )

    def started_replica(self, rng: Random) -> Replica | None:
        """One that has a member, by chance; None if there is none."""
        started = [each for each in self.replicas.values() if each.member is not None]
        return rng.choice(started) if started else None

    def describe(self) -> str:
        """Who serves what, for a schedule that does not recover."""
        held = {
            name: (each.version, each.admission.refusal() if each.admission else "starts", each.process.runs)
            for name, each in self.replicas.items()
        }
        controller = self.controller
        status = None if controller is None else controller[1]._ledger.status(self.loop.now)
        return f"version {self.oracle.durable}, replicas {held}, {status}"

    # -- disk, store, Ray ---------------------------------------------------------------------

    def _on_disk_thread(
        self, process: Process, action: Callable[[], Any], future: asyncio.Future[Any]
    ) -> None:
        job = (process, action)
        self.disk_jobs.append(job)

        def run() -> None:
            if job not in self.disk_jobs:
                return
            self.disk_jobs.remove(job)
            try:
                result, error = action(), None
            except Exception as raised:
                result, error = None, raised
            if not future.done():
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)

        # A thread of a stopped process stands still with it: the callback runs in its context.
        hangs = self.lookups_hang and self.is_alive in getattr(action, "args", ())
        self.loop.call_at(self.loop.now + (30.0 if hangs else self.disk.latency_s()), run)

    def remove_stored(self, path: str) -> None:
        """Somebody who is not the fleet."""
        shutil.rmtree(path, ignore_errors=True)
        self.tampered.add(path)

    def is_alive(self, replica_id: str) -> bool:
        replica = self.replicas.get(replica_id)
        return replica is not None and replica.process.alive

    def end(self, replica_id: str) -> None:
        """What Ray does to a process that stands still; one that runs unheard is cut off, from Ray too."""
        replica = self.replicas.get(replica_id)
        if replica is not None and replica.process.alive and replica.process.stopped:
            self.log("{} is ended", replica_id)
            self.kill(replica.process)

    def write(self, version: int, weights: str) -> str:
        assert self.store_dir is not None
        if self.disk.full:
            raise OSError("No space left on device")
        path = self.store_dir / f"v{version:08d}"
        held = self.stored.get(str(path))
        if held is not None and path.exists():
            if held[1] != weights:
                raise OSError(f"version {version} is in the store already with other weights")
            return str(path)
        path.mkdir()
        (path / MANIFEST).write_text(self._manifest(version).encode())
        self.stored[str(path)] = (version, weights)
        return str(path)

    def _manifest(self, version: int) -> VersionManifest:
        fleet_id = None if self.controller is None else self.controller[1]._ledger.state.fleet_id
        return VersionManifest(version=version, label=None, tensors={}, fleet_id=fleet_id)

    def read(self, path: str, version: int) -> str:
        if path not in self.stored or not Path(path).exists():
            raise FileNotFoundError(f"version {version} is not in the store")
        return self.stored[path][1]

    # -- requests -----------------------------------------------------------------------------

    async def _requests(self) -> None:
        while True:
            await asyncio.sleep(0.05 + self.rng.random() * 0.9)
            self.guard(asyncio.get_running_loop().create_task(one_request(self)))


def quiet() -> None:
    """The production code's log lines are not looked at: invariants are."""
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL + 1)
