import asyncio
import pickle
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from deployments.calls.rpc import CallAddress, CallHandle, CallServer, is_lost, retried, run_sync
from deployments.protocol.errors import Conflict, FleetUnavailable, SlipstreamError
from tests.waiting import reached


class Target:
    def __init__(self, name: str = "first") -> None:
        self.name = name
        self.called = 0

    async def echo(self, *args: Any, **kwargs: Any) -> Any:
        self.called += 1
        return self.name, args, kwargs

    async def refuses(self) -> None:
        raise Conflict("another publisher", {"holder": "trainer"})

    async def fails(self) -> None:
        raise KeyError("no such thing")

    async def hangs(self) -> None:
        self.called += 1
        await asyncio.Event().wait()

    async def _private(self) -> str:
        self.called += 1
        return "secret"


class Deployment:
    """As a `DeploymentHandle` of a deployment with one replica after the other."""

    def __init__(self, *servers: CallServer) -> None:
        self.servers = list(servers)
        self.asked = 0

    def options(self, *, method_name: str) -> "Deployment":
        assert method_name == "call_address"
        return self

    @asynccontextmanager
    async def choose_replica(self) -> AsyncIterator[CallServer]:
        yield self.servers[0] if len(self.servers) == 1 else self.servers.pop(0)

    async def dispatch(self, chosen: CallServer) -> CallAddress:
        self.asked += 1
        return await chosen.address()


def handle(deployment: Any) -> CallHandle:
    return CallHandle(deployment)


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture
async def server(target: Target) -> AsyncIterator[CallServer]:
    server = CallServer(target, lambda: "127.0.0.1")
    yield server
    await server.aclose()


class Replaced(Deployment):
    """Serve cancels what it has asked of a replica that it stops, and raises that in the caller."""

    async def dispatch(self, chosen: CallServer) -> CallAddress:
        if not self.asked:
            self.asked += 1
            raise asyncio.CancelledError
        return await super().dispatch(chosen)


async def test_look_up_that_serve_cancels_is_a_lost_process_and_no_cancelled_caller(
    server: CallServer,
) -> None:
    calls = handle(Replaced(server))
    with pytest.raises(FleetUnavailable, match="echo: the process is gone") as caught:
        await calls.echo.remote()
    assert is_lost(caught.value)
    assert (await calls.echo.remote(1))[0] == "first"


async def test_the_address_is_asked_once(server: CallServer) -> None:
    deployment = Deployment(server)
    calls = handle(deployment)
    for number in range(3):
        assert await calls.echo.remote(number, two=2) == ("first", (number,), {"two": 2})
    assert deployment.asked == 1


async def test_many_calls_wait_at_once_and_large_ones_arrive_whole(
    server: CallServer, target: Target
) -> None:
    calls = handle(Deployment(server))
    waiting = [calls.hangs.remote() for _ in range(150)]
    payload = b"x" * (5 << 20)
    assert await calls.echo.remote(payload) == ("first", (payload,), {})
    await reached(lambda: target.called == 151)
    for each in waiting:
        each.cancel()


async def test_errors_reach_the_caller(server: CallServer) -> None:
    calls = handle(Deployment(server))
    with pytest.raises(Conflict, match="another publisher") as conflict:
        await calls.refuses.remote()
    assert conflict.value.detail == {"holder": "trainer"} and not is_lost(conflict.value)
    with pytest.raises(SlipstreamError, match="KeyError: 'no such thing'"):
        await calls.fails.remote()
    with pytest.raises(SlipstreamError, match="TypeError"):
        await calls.refuses.remote("an argument too many")


async def test_a_lost_process_fails_its_calls_and_the_next_call_reaches_its_successor(
    server: CallServer, target: Target
) -> None:
    successor = CallServer(Target("second"), lambda: "127.0.0.1")
    calls = handle(Deployment(server, successor))
    waiting = asyncio.ensure_future(calls.hangs.remote())
    await reached(lambda: target.called == 1)
    await server.aclose()
    with pytest.raises(FleetUnavailable, match="is gone") as lost:
        await asyncio.wait_for(waiting, 5)
    assert is_lost(lost.value)
    assert await calls.echo.remote() == ("second", (), {})
    await successor.aclose()


async def test_a_call_that_cannot_be_sent_goes_to_the_successor(server: CallServer) -> None:
    """Nothing was asked while the process was replaced: the next question is no error."""
    successor = CallServer(Target("second"), lambda: "127.0.0.1")
    calls = handle(Deployment(server, successor))
    await calls.echo.remote()
    await server.aclose()
    assert await calls.echo.remote() == ("second", (), {})
    await successor.aclose()
    with pytest.raises(FleetUnavailable, match="is gone") as lost:
        await calls.echo.remote()
    assert is_lost(lost.value)


async def test_a_process_that_hangs_is_left_after_the_callers_own_deadline(server: CallServer) -> None:
    successor = CallServer(Target("second"), lambda: "127.0.0.1")
    calls = handle(Deployment(server, successor))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await calls.hangs.remote()
    assert await calls.echo.remote() == ("second", (), {})
    await successor.aclose()


@pytest.mark.parametrize("path", ["_private", "__class__", "nothing"])
async def test_only_public_methods_are_served(server: CallServer, target: Target, path: str) -> None:
    with pytest.raises(FleetUnavailable, match="404"):
        await handle(Deployment(server))._call(path, (), {})
    assert target.called == 0


@pytest.mark.parametrize("key", ["", "Bearer x"])
async def test_nothing_is_unpickled_without_the_key(server: CallServer, target: Target, key: str) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return pytest.fail, ("it was unpickled",)

    url = (await server.address()).url
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        answer = await client.post(
            f"{url}/echo", content=pickle.dumps(Bomb()), headers={"authorization": key} if key else {}
        )
    assert (answer.status_code, answer.content, target.called) == (401, b"", 0)


async def test_a_handle_is_sent_to_other_processes(server: CallServer) -> None:
    sent_on = pickle.loads(pickle.dumps(CallHandle(await server.address())))
    assert await sent_on.echo.remote() == ("first", (), {})


@pytest.fixture
def elsewhere(target: Target) -> Iterator[CallHandle]:
    """Called by a thread without an event loop."""
    with ThreadPoolExecutor(1) as pool:
        loop = asyncio.new_event_loop()
        pool.submit(loop.run_forever)
        server = CallServer(target, lambda: "127.0.0.1")
        address = asyncio.run_coroutine_threadsafe(server.address(), loop).result()
        yield CallHandle(address)
        asyncio.run_coroutine_threadsafe(server.aclose(), loop).result()
        loop.call_soon_threadsafe(loop.stop)


def test_a_thread_without_an_event_loop_waits_for_the_answer(elsewhere: CallHandle) -> None:
    async def ask(method: str) -> Any:
        return await asyncio.wait_for(getattr(elsewhere, method).remote(), 5.0)

    assert run_sync(ask("echo")) == ("first", (), {})
    with pytest.raises(Conflict):
        run_sync(ask("refuses"))


# -- deadlines and successors; see also `test_publish_session` --------------------------------------


async def test_a_cancellation_that_races_the_response_is_not_lost() -> None:
    """`asyncio.wait_for` of Python 3.11 returns the answer then, and its caller lives on."""
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def call() -> int:
        return await answer

    asking = asyncio.create_task(retried(SimpleNamespace(ask=SimpleNamespace(remote=call)), "ask"))
    await asyncio.sleep(0.01)
    answer.set_result(1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_silent_process_is_a_timeout() -> None:
    with pytest.raises(FleetUnavailable, match=r"ask: no answer within 0\.05 s"):
        silent = SimpleNamespace(remote=asyncio.Event().wait)
        await retried(SimpleNamespace(ask=silent), "ask", limit_s=0.05)
