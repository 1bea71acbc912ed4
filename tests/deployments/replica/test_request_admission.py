import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.protocol.errors import Conflict, ReplicaUnavailable
from deployments.protocol.routing import Demand
from deployments.replica.request_admission import RequestAdmission


class Replica:
    """What admission looks at, with a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.dead = False
        self.member = SimpleNamespace(version=3, admitted=True, fenced=None, changed=asyncio.Condition())
        self.follower = SimpleNamespace(last_contact=100.0)
        member: Any = self.member
        follower: Any = self.follower
        self.admission = RequestAdmission(
            "r0", member, follower, self_fence_s=20.0, engine_dead=lambda: self.dead, clock=lambda: self.now
        )

    async def change(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self.member, name, value)
        async with self.member.changed:
            self.member.changed.notify_all()


@pytest.fixture
def replica() -> Replica:
    return Replica()


async def test_refusals_name_their_reason(replica: Replica) -> None:
    async def refused(reason: str) -> None:
        assert replica.admission.refusal() == reason
        with pytest.raises(ReplicaUnavailable, match=f"^replica r0: {reason}$") as caught:
            await replica.admission.wait(Demand())
        assert caught.value.detail == {"replica": "r0"}

    replica.now = 120.5
    await refused("no contact with the controller for 20 s")
    replica.dead = True
    await refused("engine is dead")
    replica.member.admitted = False
    await refused("not admitted yet")
    replica.member.fenced = "verify: missing"
    await refused("fenced: verify: missing")
    replica.admission.close()
    await refused("shutting down")


async def test_renewed_contact_ends_the_self_fence(replica: Replica) -> None:
    replica.now = 121.0
    assert replica.admission.refusal() is not None
    replica.follower.last_contact = 121.0
    assert replica.admission.refusal() is None


async def test_request_waits_for_its_min_version(replica: Replica) -> None:
    waiting = asyncio.create_task(replica.admission.wait(Demand(min_version=4, timeout_s=60)))
    await asyncio.sleep(0)
    await replica.change(version=4)
    await asyncio.wait_for(waiting, 5)


async def test_min_version_not_reached_in_time_is_a_conflict(replica: Replica) -> None:
    with pytest.raises(Conflict, match=r"asks for version 4; the fleet serves 3 .* within 0.01 s") as caught:
        await replica.admission.wait(Demand(min_version=4, timeout_s=0.01))
    assert caught.value.detail == {"expected": 4, "actual": 3}


async def test_fence_ends_the_wait_for_a_version(replica: Replica) -> None:
    waiting = asyncio.create_task(replica.admission.wait(Demand(min_version=4, timeout_s=60)))
    await asyncio.sleep(0)
    await replica.change(fenced="commit: failed", admitted=False)
    with pytest.raises(ReplicaUnavailable, match="fenced: commit: failed"):
        await asyncio.wait_for(waiting, 5)


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["no contact with the controller for 21 s", "engine is dead"])
async def test_lost_contact_and_engine_death_end_the_wait_for_a_version(
    replica: Replica, reason: str
) -> None:
    waiting = asyncio.create_task(replica.admission.wait(Demand(min_version=4, timeout_s=600)))
    await asyncio.sleep(0)
    if "contact" in reason:
        replica.now = 121.0
    else:
        replica.dead = True
    with pytest.raises(ReplicaUnavailable, match=reason):
        await asyncio.wait_for(waiting, 5)
