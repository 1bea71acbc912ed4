"""The adapters' part of a world: its users, its oracle, and what becomes of files on the disk."""

import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from deployments.ledger.decisions import Decision
from deployments.ledger.ledger_config import AdapterLimits
from tests.simulation.adapters.oracle import KEEP, AdapterOracle
from tests.simulation.adapters.users import NAMES, AdapterUser
from tests.simulation.loop import Process

if TYPE_CHECKING:
    from tests.simulation.adapters.engine import SimAdapters
    from tests.simulation.world import World

USERS = 2
TORN_BYTES = 80  # of a file that a process writes when it dies: a whole configuration, half of the tensors


class AdapterScene:
    """Users of adapters, in a world that has them."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._rng = Random(f"{world.seed} adapters")
        self.oracle = AdapterOracle(world.loop.time, self._serving, self._log, self._violate)
        self.users: list[AdapterUser] = []
        self._calm_s: float | None = None  # when the faults ended
        synced = world.disk.synced

        def both(decisions: Sequence[Decision]) -> None:
            synced(decisions)
            self.oracle.synced(decisions)

        world.disk.synced = both

    def _log(self, text: str, *args: Any) -> None:
        self._world.log(text, *(str(each).replace(str(self._world.store_dir), "/store") for each in args))

    def _violate(self, violation: AssertionError) -> None:
        self._world.violation = self._world.violation or violation  # type: ignore[assignment]

    def _serving(self) -> list[tuple[str, Sequence[str]]]:
        replicas = self._world.replicas.items()
        return [
            (name, each.member.lora.names)
            for name, each in replicas
            if each.admits and each.member and each.member.lora
        ]

    def new_engine(self) -> "SimAdapters":
        from tests.simulation.adapters.engine import SimAdapters  # and vLLM

        return SimAdapters(self._world.work, self.oracle)

    def settings(self) -> dict[str, Any]:
        """Of a controller."""
        limits = AdapterLimits(keep=KEEP, most=8, base_model="base")
        return {"adapters": limits, "adapter_roots": [self.directory]}

    @property
    def directory(self) -> Path:
        """Where users have their adapters."""
        assert self._world.store_dir is not None
        return self._world.store_dir / "users"

    def start(self) -> None:
        self._world.loop.call_later(1.0, self._start_users)

    def _start_users(self) -> None:
        for index in range(USERS):
            name = f"u{index + 1}"
            user = AdapterUser(
                name,
                self._world.controller_handle,
                self.oracle,
                Random(f"{self._world.seed} {name}"),
                self.directory,
                lambda: self._world.damaged,
                self._wanted,
            )
            self.users.append(user)
            self._world.guard(self._world.loop.spawn(Process(name), user.run()))

    def some_name(self) -> str | None:
        """What a request names: no adapter, a name, or a full name."""
        live = sorted(self.oracle.promised) or [each.full_name for each in self.oracle.durable.live]
        kind = self._rng.random()
        if kind < 0.4 or not live:
            return None
        return self._rng.choice(live if kind < 0.7 else NAMES)

    # -- the disk -----------------------------------------------------------------------------

    def on_disk(self, action: Callable[[], Any]) -> Any:
        """Run what a thread does; files cannot grow while the disk is full."""
        if not (self._world.disk.full and getattr(action, "any_thread", False)):
            return action()
        with _files_at_most(0):
            return action()

    def dying(self, action: Callable[[], Any]) -> Any:
        """Run what a thread does while its process dies: the kernel ends it in the middle of a file."""
        if not getattr(action, "any_thread", False):
            return action()
        child = os.fork()
        if child == 0:
            try:
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                with _files_at_most(TORN_BYTES):
                    action()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return None

    # -- the end ------------------------------------------------------------------------------

    def recover(self, calm_s: float, limit_s: float) -> str | None:
        """What is wrong once the faults are over: any name can be loaded, and nothing is left in the end."""
        self._calm_s = calm_s
        if not self._world.run(lambda: not self._wanted(), self._world.loop.now + limit_s):
            return f"{self._wanted()} cannot be loaded: {self._world.describe()}"
        for user in self.users:
            user.ends = True
        if self._world.run(lambda: self._left() is None, self._world.loop.now + limit_s):
            return None
        return f"{self._left()}: {self._world.describe()}"

    def _wanted(self) -> list[str]:
        """Names whose last load was asked for before the faults ended."""
        if self._calm_s is None:
            return []
        return [name for name in NAMES if self.oracle.loads.get(name, 0.0) < self._calm_s]

    def _left(self) -> str | None:
        if not all(user.ended for user in self.users):
            return "a user waits for an answer"
        held = [
            (each.name, each.member.lora.state.held)
            for each in self._world.replicas.values()
            if each.member and each.member.lora
        ]
        assert self._world.store_dir is not None
        directory = self._world.store_dir / "adapters"
        stored = os.listdir(directory) if directory.is_dir() else []
        return self.oracle.unclean(held, stored)


@contextmanager
def _files_at_most(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
