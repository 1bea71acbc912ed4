"""When the trainer publishes because the committed version exists nowhere."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from deployments.protocol.errors import FleetUnavailable
from deployments.protocol.responses import FleetStatus, MemberStatus, RoundStatus
from deployments.trainer.trainer import CONFIRMATIONS, is_lost, is_starved, watch
from tests.deployments.ledger.ledger_scene import Scene

ROUND = RoundStatus(round_id=5, version=5, label=None, phase="open", age_s=1.0, participants=("r0",))


def fleet(
    *members: tuple[str, int],
    committed: int = 4,
    stored: int | None = 3,
    current_round: RoundStatus | None = None,
) -> FleetStatus:
    return replace(
        Scene().status(),
        committed_version=committed,
        stored_version=stored,
        round=current_round,
        members=tuple(
            MemberStatus(
                replica_id=f"r{index}",
                incarnation=f"r{index}-1",
                state=state,
                admitted=state == "serving",
                version=version,
                world_size=1,
                silent_s=0.0,
                pending=(),
                reason="",
            )
            for index, (state, version) in enumerate(members)
        ),
    )


LOST = fleet(("joining", 3), ("joining", 3))
SERVED = fleet(("serving", 4))


@pytest.mark.parametrize(
    ("status", "lost"),
    [
        (LOST, True),
        (fleet(("joining", 0), stored=None), True),
        (fleet(("joining", 3), ("fenced", 3)), True),
        (fleet(("joining", 3), stored=4), False),  # it catches up from the store
        (fleet(("joining", 3), ("serving", 4)), False),  # one has it, and may be writing it to the store
        (fleet(("joining", 4)), False),  # about to be admitted
        (fleet(("joining", 0), committed=0, stored=None), False),  # version 0 is the checkpoint
        (fleet(), False),  # no replica waits
        (fleet(("joining", 3), current_round=ROUND), False),  # the round brings a newer version
    ],
)
def test_a_version_is_lost_when_joiners_wait_for_what_nobody_has(status: FleetStatus, lost: bool) -> None:
    assert is_lost(status) is lost


STARVED = replace(fleet(("joining", 3), ("serving", 4)), store_problem="version 4 is not in the store")


@pytest.mark.parametrize(
    ("status", "published", "starved"),
    [
        (STARVED, 4, True),
        (STARVED, 3, False),  # another publisher's: the trainer's weights would take its place
        (replace(STARVED, store_problem=None), 4, False),  # not for long yet
        (replace(STARVED, round=ROUND), 4, False),
        (replace(SERVED, store_problem="version 4 is not in the store"), 4, False),  # nobody waits for it
    ],
)
def test_joiners_starve_when_only_replicas_hold_what_the_trainer_published(
    status: FleetStatus, published: int, starved: bool
) -> None:
    assert is_starved(status, published) is starved and not is_lost(status)


async def labels_published(statuses: Sequence[FleetStatus | Exception], publish_fails: int = 0) -> list[str]:
    """What `watch` publishes while the controller gives these answers, one per check."""
    answers: Iterator[FleetStatus | Exception] = iter(statuses)
    published: list[str] = []
    exhausted = asyncio.Event()

    async def status() -> FleetStatus:
        answer = next(answers, None)
        if answer is None:
            exhausted.set()
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return answer

    async def publish(label: str) -> None:
        published.append(label)
        if len(published) <= publish_fails:
            raise FleetUnavailable("no replica is registered")

    watching = asyncio.create_task(watch(status, publish, lambda: 4, period_s=0.0))
    await exhausted.wait()
    watching.cancel()
    return published


async def test_a_version_that_is_lost_in_several_checks_in_a_row_is_published_anew() -> None:
    assert await labels_published([LOST] * CONFIRMATIONS) == ["version 4 was lost"]
    assert await labels_published([LOST] * (CONFIRMATIONS - 1)) == []


async def test_a_version_that_never_reached_the_store_is_published_anew_for_those_who_wait() -> None:
    assert await labels_published([STARVED] * CONFIRMATIONS) == ["version 4 was not stored"]
    assert await labels_published([STARVED] * (CONFIRMATIONS - 1)) == []


async def test_a_store_that_is_written_in_time_needs_no_new_version() -> None:
    assert await labels_published([LOST, LOST, SERVED, LOST, LOST]) == []


async def test_the_watch_survives_an_unreachable_controller_and_a_failed_round() -> None:
    unreachable = FleetUnavailable("the controller is away")
    checks: list[FleetStatus | Exception] = [LOST, LOST, unreachable, LOST]
    assert await labels_published(checks) == ["version 4 was lost"], "a missed check resets nothing"
    assert await labels_published([LOST] * 6, publish_fails=1) == ["version 4 was lost"] * 2
