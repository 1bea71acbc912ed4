import asyncio
import time

import pytest

from deployments.replica.graceful_shutdown import shut_down


class Fleet:
    """The replica's member and front, and the controller that it talks to."""

    def __init__(self, running: int = 0, *, releases: bool = True) -> None:
        self.leaving = self.drained = self.is_writing = False
        self.running = running
        self.releases = releases
        self.failed = False
        self.contact = True
        self.all_stops = False
        self.happened: list[str] = []

    @property
    def may_leave(self) -> bool:
        return self.releases and self.drained

    @may_leave.setter
    def may_leave(self, value: bool) -> None:
        self.releases = value

    async def send_last_report(self) -> None:
        self.happened.append("last report")
        if not self.contact:
            raise ConnectionError("no controller")

    async def application_stops(self) -> bool:
        if not self.contact:
            raise ConnectionError("no Serve")
        return self.all_stops

    async def leave(
        self, *, drain_s: float = 5.0, release_s: float = 5.0, lost_contact_s: float = 5.0
    ) -> float:
        """The seconds that it took."""
        begin = time.monotonic()
        leaving = shut_down(
            self,
            last_contact=lambda: time.monotonic() if self.contact else begin,
            in_flight=lambda: self.running,
            failed=lambda: self.failed,
            stop=lambda: self.happened.append(f"stop with {self.running}"),
            send_last_report=self.send_last_report,
            application_stops=self.application_stops,
            drain_s=drain_s,
            release_s=release_s,
            lost_contact_s=lost_contact_s,
        )
        await asyncio.wait_for(leaving, 3)
        return time.monotonic() - begin


async def test_idle_replica_sends_its_last_report_at_once() -> None:
    fleet = Fleet()
    await fleet.leave()
    assert fleet.leaving and fleet.drained
    assert fleet.happened == ["stop with 0", "last report"]


async def test_running_requests_finish_first() -> None:
    fleet = Fleet(running=1)
    task = asyncio.create_task(fleet.leave())
    await asyncio.sleep(0.15)
    assert fleet.leaving and not fleet.drained and not fleet.happened
    fleet.running = 0
    await task
    assert fleet.happened == ["stop with 0", "last report"]


async def test_shutdown_waits_for_the_open_round() -> None:
    fleet = Fleet(releases=False)
    task = asyncio.create_task(fleet.leave())
    await asyncio.sleep(0.15)
    assert fleet.drained and fleet.happened == ["stop with 0"]
    fleet.releases = True
    await task
    assert fleet.happened[-1] == "last report"


@pytest.mark.parametrize(
    ("limits", "warning"),
    [
        ({"drain_s": 0.1}, "aborting 2 requests that are still running"),
        ({"drain_s": 0.1, "release_s": 0.1}, "exiting before the ledger released this replica"),
    ],
)
async def test_every_wait_has_a_limit(
    limits: dict[str, float], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(running=2, releases="release_s" not in limits)
    await fleet.leave(**limits)
    assert fleet.happened == ["stop with 2", "last report"]
    assert warning in caplog.messages


async def test_application_shutdown_only_drains_requests() -> None:
    fleet = Fleet(running=1, releases=False)
    fleet.all_stops = True
    task = asyncio.create_task(fleet.leave())
    await asyncio.sleep(0.15)
    assert not fleet.happened
    fleet.running = 0
    assert await task < 1
    assert fleet.happened == ["stop with 0"]


async def test_application_shutdown_waits_for_a_version_that_is_being_written() -> None:
    fleet = Fleet()
    fleet.all_stops = fleet.is_writing = True
    task = asyncio.create_task(fleet.leave(lost_contact_s=-1.0))  # the controller may be gone
    await asyncio.sleep(0.15)
    assert fleet.happened == ["stop with 0"] and not task.done()
    fleet.is_writing = False
    await task


async def test_lost_controller_is_not_waited_for() -> None:
    fleet = Fleet(running=1, releases=False)
    fleet.contact = False
    assert await fleet.leave(lost_contact_s=0.2) < 1
    assert fleet.happened == ["stop with 1", "last report"]
