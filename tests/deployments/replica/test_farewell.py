"""How a replica that is no longer wanted ends."""

import asyncio
import time

import pytest

from deployments.replica.farewell import Farewell


class Fleet:
    """The replica's member and front, and the controller that it talks to."""

    def __init__(self, running: int = 0, *, lets_go: bool = True) -> None:
        self.leaving = self.drained = False
        self.running = running
        self.lets_go = lets_go
        self.failed = False
        self.contact = True
        self.ends = False
        self.happened: list[str] = []

    @property
    def may_leave(self) -> bool:
        return self.lets_go and self.drained

    @may_leave.setter
    def may_leave(self, value: bool) -> None:
        self.lets_go = value

    async def goodbye(self) -> None:
        self.happened.append("goodbye")
        if not self.contact:
            raise ConnectionError("no controller")

    async def fleet_ends(self) -> bool:
        if not self.contact:
            raise ConnectionError("no Serve")
        return self.ends

    async def leave(self, *, drain_s: float = 5.0, leave_s: float = 5.0, abandoned_s: float = 5.0) -> float:
        """The seconds that it took."""
        begin = time.monotonic()
        farewell = Farewell(
            self,
            last_contact=lambda: time.monotonic() if self.contact else begin,
            in_flight=lambda: self.running,
            failed=lambda: self.failed,
            stop=lambda: self.happened.append(f"stop with {self.running}"),
            goodbye=self.goodbye,
            fleet_ends=self.fleet_ends,
            drain_s=drain_s,
            leave_s=leave_s,
            abandoned_s=abandoned_s,
        )
        await asyncio.wait_for(farewell.run(), 3)
        return time.monotonic() - begin


async def test_an_idle_replica_says_goodbye_at_once() -> None:
    fleet = Fleet()
    await fleet.leave()
    assert fleet.leaving and fleet.drained
    assert fleet.happened == ["stop with 0", "goodbye"]


async def test_requests_that_run_end_first() -> None:
    fleet = Fleet(running=1)
    task = asyncio.create_task(fleet.leave())
    await asyncio.sleep(0.15)
    assert fleet.leaving and not fleet.drained and not fleet.happened
    fleet.running = 0
    await task
    assert fleet.happened == ["stop with 0", "goodbye"]


async def test_it_waits_for_the_round_that_it_is_in() -> None:
    fleet = Fleet(lets_go=False)
    task = asyncio.create_task(fleet.leave())
    await asyncio.sleep(0.15)
    assert fleet.drained and fleet.happened == ["stop with 0"]
    fleet.lets_go = True
    await task
    assert fleet.happened[-1] == "goodbye"


@pytest.mark.parametrize(
    ("limits", "warning"),
    [
        ({"drain_s": 0.1}, "2 requests are still running: their answers are cut off"),
        ({"drain_s": 0.1, "leave_s": 0.1}, "this replica ends before the fleet has let it go"),
    ],
)
async def test_nothing_is_waited_for_longer_than_its_limit(
    limits: dict[str, float], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(running=2, lets_go="leave_s" not in limits)
    await fleet.leave(**limits)
    assert fleet.happened == ["stop with 2", "goodbye"]
    assert warning in caplog.messages


async def test_with_a_fleet_that_ends_as_a_whole_only_requests_are_waited_for() -> None:
    fleet = Fleet(running=1, lets_go=False)
    fleet.ends = True
    task = asyncio.create_task(fleet.leave())
    await asyncio.sleep(0.15)
    assert not fleet.happened
    fleet.running = 0
    assert await task < 1
    assert fleet.happened == ["stop with 0"]


async def test_a_controller_that_stays_away_is_not_waited_for() -> None:
    fleet = Fleet(running=1, lets_go=False)
    fleet.contact = False
    assert await fleet.leave(abandoned_s=0.2) < 1
    assert fleet.happened == ["stop with 1", "goodbye"]


async def test_a_failed_replica_waits_for_nobody() -> None:
    fleet = Fleet(running=1, lets_go=False)
    fleet.failed = True
    assert await fleet.leave() < 0.5
    assert fleet.happened == ["stop with 1"]
