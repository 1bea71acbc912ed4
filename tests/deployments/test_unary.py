"""Calls as ordinary ones: sent at once, from a coroutine or a thread, and by a handle that was sent on."""

import asyncio
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from deployments.unary import UnaryHandle, run_sync


class FakeHandle:
    """As `DeploymentHandle`: a place is reserved, and given back by whoever does not use it."""

    places = 0

    def __init__(self, method: str = "") -> None:
        self.method = method

    def options(self, *, method_name: str) -> "FakeHandle":
        return FakeHandle(method_name)

    @asynccontextmanager
    async def choose_replica(self) -> AsyncIterator[str]:
        FakeHandle.places += 1
        try:
            yield "chosen"
        finally:
            FakeHandle.places -= 1

    async def dispatch(self, chosen: str, *args: Any, **kwargs: Any) -> Any:
        assert chosen == "chosen"
        if self.method == "fails":
            raise ValueError("no")
        if self.method == "hangs":
            await asyncio.sleep(60)
        return self.method, args, kwargs


def handle() -> UnaryHandle:
    made: Any = FakeHandle()
    return UnaryHandle(made)


async def test_a_coroutine_awaits_the_answer() -> None:
    assert await handle().fleet.remote(1, two=2) == ("fleet", (1,), {"two": 2})
    with pytest.raises(ValueError, match="no"):
        await handle().fails.remote()


def test_a_thread_without_an_event_loop_waits_for_it() -> None:
    async def ask(method: str) -> Any:
        return await asyncio.wait_for(getattr(handle(), method).remote(1), 0.05)

    assert run_sync(ask("fleet")) == ("fleet", (1,), {})
    with pytest.raises(ValueError, match="no"):
        run_sync(ask("fails"))
    with pytest.raises(TimeoutError):
        run_sync(ask("hangs"))


async def test_a_call_that_is_given_up_leaves_its_place() -> None:
    before = FakeHandle.places
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(handle().hangs.remote(), 0.05)
    assert FakeHandle.places == before


async def test_it_is_sent_on_to_other_processes() -> None:
    sent_on = pickle.loads(pickle.dumps(handle()))
    assert await sent_on.fleet.remote() == ("fleet", (), {})
