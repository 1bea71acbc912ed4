import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from deployments.protocol.errors import Conflict, ReplicaUnavailable
from deployments.protocol.routing import Demand
from deployments.replica.follower import Follower

if TYPE_CHECKING:  # it loads vLLM
    from deployments.replica.member import EngineMember

RECHECK_S = 0.5  # lost contact and dead engines notify no waiter


class RequestAdmission:
    """Checks every request on the replica, the authority; a router's view may be stale.

    `self_fence_s`: refuse after this long without contact to the controller; below its heartbeat timeout,
    after which the fleet moves on.
    """

    def __init__(
        self,
        replica_id: str,
        member: "EngineMember",
        follower: Follower,
        *,
        self_fence_s: float,
        engine_dead: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replica_id = replica_id
        self._member = member
        self._follower = follower
        self._self_fence_s = self_fence_s
        self._engine_dead = engine_dead
        self._clock = clock
        self._closed = False

    def close(self) -> None:
        self._closed = True

    def refusal(self) -> str | None:
        if self._closed:
            return "shutting down"
        if self._member.fenced is not None:
            return f"fenced: {self._member.fenced}"
        if not self._member.admitted:
            return "not admitted yet"
        if self._engine_dead():
            return "engine is dead"
        silent_s = self._clock() - self._follower.last_contact
        if silent_s > self._self_fence_s:
            return f"no contact with the controller for {silent_s:.0f} s"
        return None

    async def wait(self, demand: Demand) -> None:
        """Raises ReplicaUnavailable, or Conflict if the demanded version was not reached in time."""
        self._check()
        if self._member.version >= demand.min_version:
            return
        try:
            async with asyncio.timeout(demand.timeout_s):
                await self._until_decided(demand.min_version)
        except TimeoutError:
            raise Conflict(
                f"x-min-weight-version asks for version {demand.min_version}; the fleet serves "
                f"{self._member.version} and did not reach it within {demand.timeout_s:g} s",
                {"expected": demand.min_version, "actual": self._member.version},
            ) from None
        self._check()

    async def _until_decided(self, min_version: int) -> None:
        def decided() -> bool:
            return self._member.version >= min_version or self.refusal() is not None

        changed = self._member.changed
        while not decided():
            with suppress(TimeoutError):
                async with asyncio.timeout(RECHECK_S), changed:
                    await changed.wait_for(decided)

    def _check(self) -> None:
        refusal = self.refusal()
        if refusal is not None:
            raise ReplicaUnavailable(f"replica {self._replica_id}: {refusal}", {"replica": self._replica_id})
