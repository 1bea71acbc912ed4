"""Calls that are repeated: what ends the wait for an answer."""

import asyncio

import pytest

from deployments.calls.lost_calls import answered
from deployments.protocol.errors import FleetUnavailable


async def test_a_cancellation_beside_the_answer_is_not_lost() -> None:
    """`asyncio.wait_for` of Python 3.11 returns the answer then, and its caller lives on."""
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def call() -> int:
        return await answer

    asking = asyncio.create_task(answered(call, "a question"))
    await asyncio.sleep(0.01)
    answer.set_result(1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_silent_process_ends_the_wait() -> None:
    with pytest.raises(FleetUnavailable, match=r"a question: nobody answered within 0\.05 s"):
        await answered(asyncio.Event().wait, "a question", limit_s=0.05)
