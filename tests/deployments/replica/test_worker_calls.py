import asyncio
import os
import stat
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from deployments.host.shared_memory import DIRECTORY, disown, owner
from deployments.replica.worker_calls import WorkerCalls, answer_calls, open_connection


class Workers:
    """Two workers whose engine is in the middle of a step, but for the call that connects them."""

    def __init__(self) -> None:
        self.through_vllm: list[str] = []
        self.threads: list[threading.Thread] = []
        self.ends: list[Any] = []
        self.elsewhere: set[int] = set()  # on another host
        self.silent: set[int] = set()  # say that they have connected, and have not
        self.turns = 0  # of the replica's event loop, before it has the answer
        self.hold = threading.Event()
        self.modes: list[int] = []

    async def __call__(self, method: str, **arguments: Any) -> list[Any]:
        self.through_vllm.append(method)
        if method != "answer_calls_at":
            return ["vllm", "vllm"]
        path = Path(arguments["path"])
        connected = [await asyncio.to_thread(self._connect, 0, path), self._connect(1, path)]
        for _ in range(self.turns):
            await asyncio.sleep(0)
        return connected

    def _connect(self, index: int, path: Path) -> bool:
        if index in self.elsewhere:
            path = path.with_name("not-on-this-host")
        if index in self.silent:
            return True
        try:
            end = open_connection(path)
        except OSError:
            return False
        self.modes.append(stat.S_IMODE(os.stat(path).st_mode))
        methods = {"name": lambda: index, "double": self._double, "wait": self._wait, "fail": self._fail}
        self.ends.append(end)
        self.threads.append(threading.Thread(target=answer_calls, args=(end, methods), daemon=True))
        self.threads[-1].start()
        return True

    def _double(self, number: int) -> int:
        return 2 * number

    def _wait(self) -> str:
        assert self.hold.wait(20)
        return "late"

    def _fail(self, times: int = 1) -> None:
        raise ValueError("unexpected module" * times)


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
async def calls(workers: Workers) -> AsyncIterator[WorkerCalls]:
    made = WorkerCalls(workers)
    yield made
    made.close()
    workers.hold.set()
    for each in workers.threads:
        await asyncio.to_thread(each.join, 20)
        assert not each.is_alive()
    disown()


async def test_an_error_that_names_thousands_of_modules_is_an_error_and_the_next_call_is_answered(
    calls: WorkerCalls,
) -> None:
    await calls.connect()
    with pytest.raises(RuntimeError, match=r"^ValueError: unexpected module"):
        await calls("fail", times=10_000)
    assert await calls("double", number=21) == [42, 42]


async def test_socket_is_private_and_removed(calls: WorkerCalls, workers: Workers) -> None:
    await calls.connect()
    assert workers.modes == [0o600, 0o600]
    assert list(DIRECTORY.glob(f"{owner().name('worker-calls')}*")) == []


async def test_concurrent_calls_get_their_own_answers(calls: WorkerCalls) -> None:
    await calls.connect()
    answers = await asyncio.gather(*(calls("double", number=number) for number in range(50)))
    assert answers == [[2 * number] * 2 for number in range(50)]


async def test_answer_to_a_cancelled_call_is_discarded(calls: WorkerCalls, workers: Workers) -> None:
    await calls.connect()
    cancelled = asyncio.create_task(calls("wait"))
    await asyncio.sleep(0.05)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    following = asyncio.create_task(calls("double", number=4))
    await asyncio.sleep(0.05)
    assert not following.done(), "a worker reads one after the other"
    workers.hold.set()
    assert await following == [8, 8]


async def test_worker_error_is_raised_and_the_thread_continues(calls: WorkerCalls, workers: Workers) -> None:
    await calls.connect()
    with pytest.raises(RuntimeError, match="ValueError: unexpected module"):
        await calls("fail")
    with pytest.raises(RuntimeError, match="KeyError: 'unknown'"):
        await calls("unknown")
    assert await calls("double", number=1) == [2, 2]
    assert workers.through_vllm == ["answer_calls_at"]


@pytest.mark.parametrize("elsewhere", [{0}, {1}, {0, 1}])
async def test_worker_on_another_host_makes_all_calls_go_through_vllm(
    calls: WorkerCalls, workers: Workers, elsewhere: set[int]
) -> None:
    workers.elsewhere = elsewhere
    await calls.connect()
    assert await calls("name") == ["vllm", "vllm"]


async def test_wait_for_connections_has_a_deadline(
    calls: WorkerCalls, workers: Workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("deployments.replica.worker_calls.CONNECT_S", 0.1)
    workers.silent = {1}
    with caplog.at_level("WARNING", "ray.serve"):
        await calls.connect()
    assert "1 of 2 did not connect within 0.1 s" in caplog.text
    assert await calls("name") == ["vllm", "vllm"]


async def test_engine_starts_without_a_socket(
    calls: WorkerCalls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("deployments.replica.worker_calls.DIRECTORY", tmp_path / "missing")
    with caplog.at_level("WARNING", "ray.serve"):
        await calls.connect()
    assert "calls to workers wait for decoding steps" in caplog.text
    assert await calls("name") == ["vllm", "vllm"]


async def broken_before(calls: WorkerCalls, workers: Workers) -> list[Any]:
    workers.ends[1].shutdown(2)
    workers.threads[1].join(20)
    return await calls("name")


async def broken_meanwhile(calls: WorkerCalls, workers: Workers) -> list[Any]:
    waiting = asyncio.create_task(calls("wait"))
    await asyncio.sleep(0.05)
    workers.ends[1].shutdown(2)
    return await waiting


@pytest.mark.parametrize("broken", [broken_before, broken_meanwhile])
async def test_lost_connection_makes_calls_go_through_vllm(
    calls: WorkerCalls, workers: Workers, broken: Callable[[WorkerCalls, Workers], Any]
) -> None:
    await calls.connect()
    async with asyncio.timeout(20):
        assert await broken(calls, workers) == ["vllm", "vllm"]
        assert await calls("name") == ["vllm", "vllm"]
