"""A controller with replicas that are coroutines polling it in this process."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from deployments.controller.controller import Controller
from deployments.controller.journal import Journal
from deployments.ledger.decisions import Decision
from deployments.protocol.ledger_config import AdapterLimits, LedgerConfig
from deployments.protocol.publishing import RoundReport
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.waiting import reached

HELD_S = 20.0  # longer than any test waits; it ends a thread that a failed test left


class SlowDisk:
    """Writes wait while `goes` is not set."""

    def __init__(self) -> None:
        self.goes = threading.Event()
        self.goes.set()

    def open(self, directory: Path) -> Journal:
        return _SlowJournal(directory, self.goes)


class _SlowJournal(Journal):
    def __init__(self, directory: Path, goes: threading.Event) -> None:
        super().__init__(directory)
        self._goes = goes

    def append(self, decisions: Iterable[Decision]) -> None:
        self._goes.wait(HELD_S)
        super().append(decisions)


CONFIG = LedgerConfig(heartbeat_timeout_s=5, stage_timeout_s=5, commit_timeout_s=5, call_timeout_s=5)
LONGER_THAN_ANY_DEADLINE_S = 60.0

WAIT_S = 60.0  # real time: other processes share the cores


class Fleet:
    """A controller with fake replicas that follow it, and a clock that only the test moves."""

    def __init__(
        self,
        directory: Path,
        config: LedgerConfig = CONFIG,
        model: str | None = None,
        adapters: AdapterLimits | None = None,
        tick_s: float = 0.02,
        **options: Any,
    ) -> None:
        self.now = 1000.0
        self.config = config
        self.dead: set[str] = set()
        self.disk = SlowDisk()
        self.ray_answers = threading.Event()
        self.ray_answers.set()
        self.killed: list[str] = []  # processes, by replica id
        self.kill_fails: Exception | None = None
        self.polls: Counter[str] = Counter()
        self.replicas: dict[str, FakeReplica] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._new_process = partial(
            Controller,
            config=config,
            model=model,
            state_dir=str(directory / "state"),
            store_dir=str(directory / "store"),
            is_alive=self._is_alive,
            kill=self._kill,
            adapters=adapters,
            adapter_roots=[directory],
            poll_s=0.05,
            silent_s=2.0,
            tick_s=tick_s,
            clock=lambda: self.now,
            open_journal=self.disk.open,
            **options,
        )
        self.controller = self._new_process()

    def _is_alive(self, replica_id: str) -> bool:
        self.ray_answers.wait(HELD_S)
        return replica_id not in self.dead

    def _kill(self, replica_id: str) -> None:
        self.ray_answers.wait(HELD_S)
        if self.kill_fails is not None:
            raise self.kill_fails
        self.killed.append(replica_id)

    def start(self, *replica_ids: str) -> None:
        for replica_id in replica_ids:
            self.add(FakeReplica(replica_id=replica_id, incarnation=f"{replica_id}-1"))

    async def serve(self, *replica_ids: str) -> None:
        """Start replicas, and wait until the controller has admitted them."""
        self.start(*replica_ids)
        await self.admitted(*replica_ids)

    def add(self, replica: FakeReplica) -> None:
        """It follows the controller from now on, or again."""
        self.replicas[replica.replica_id] = replica
        self._followers[replica.replica_id] = asyncio.create_task(self._follow(replica))

    def kill(self, replica_id: str) -> None:
        self._followers.pop(replica_id).cancel()
        self.dead.add(replica_id)

    async def _follow(self, replica: FakeReplica) -> None:
        while replica.fenced is None:
            replica.take(await self.controller.poll(replica.report()))
            self.polls[replica.replica_id] += 1
            await asyncio.sleep(0)
        await self.controller.poll(replica.report())  # it knows

    def hang(self, replica_id: str) -> None:
        """Its process exists and polls no more."""
        self._followers.pop(replica_id).cancel()

    async def pending(self, name: str) -> None:
        """Until an instruction of this name waits for a replica."""
        async with asyncio.timeout(WAIT_S):
            while not any(name in each.pending for each in (await self.controller.fleet()).members):
                await asyncio.sleep(0.01)

    async def members(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len((await self.controller.fleet()).members) != count:
                await asyncio.sleep(0.01)

    async def until(self, ready: Callable[[], bool]) -> None:
        await reached(ready, WAIT_S)

    async def polled(self, *replica_ids: str) -> None:
        """Until each has polled twice more: what the controller wants of it has arrived, and is done."""
        before = dict(self.polls)
        await self.until(lambda: all(self.polls[each] >= before.get(each, 0) + 2 for each in replica_ids))

    async def admitted(self, *replica_ids: str) -> None:
        await self.until(lambda: all(self.replicas[each].admitted for each in replica_ids))

    async def elapse(self, elapsed_s: float) -> None:
        """Time passes while the controller runs. Added to `now` at once, it is time that it stood still."""
        end = self.now + elapsed_s
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            await self.controller.fleet()

    async def restart(self, *silent: str) -> None:
        """Another process on the same disk; all replicas but the silent ones follow it."""
        for follower in self._followers.values():
            follower.cancel()
        await asyncio.gather(*self._followers.values(), return_exceptions=True)
        following = [each for each in self._followers if each not in silent]
        self._followers.clear()
        await self.controller.aclose()
        self.controller = self._new_process()
        for replica_id in following:
            self.add(self.replicas[replica_id])

    async def aclose(self) -> None:
        self.disk.goes.set()
        self.ray_answers.set()
        for follower in self._followers.values():
            follower.cancel()
        await asyncio.gather(*self._followers.values(), return_exceptions=True)
        await self.controller.aclose()


async def publish(fleet: Fleet, label: str | None = None) -> RoundReport:
    controller = fleet.controller
    lease = await controller.acquire("trainer")
    await controller.connect(lease.token, {})
    round_id = await controller.open_round(lease.token)
    await controller.send(lease.token, round_id, {"segment": "a"})
    return await controller.close_round(lease.token, round_id, label)
