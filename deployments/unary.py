"""Calls of a deployment that a caller which stands still cannot stop for everybody else.

`DeploymentHandle.remote` sends a call as a streaming generator (`handle_request_with_rejection` in Serve),
at the end of which Ray 2.60 waits until the caller has confirmed what it got
(`TaskGeneratorBackpressureWaiter::WaitAllObjectsReported`). It waits on the event loop of the process that
answers. A caller that is stopped or frozen in the middle of a call thereby stops the controller, for as long
as it lasts: no replica can report, and all are taken for lost. A call to a replica on which a place was
reserved before (`choose_replica`, `dispatch`) is an ordinary one, which nobody waits for.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Generator
from functools import cache
from typing import Any

from ray.serve.handle import DeploymentHandle


class UnaryCall:
    """The answer to come of one call, which is on its way already.

    To be awaited by a coroutine in the event loop that sent it, or waited for in a thread without a loop.
    """

    def __init__(self, call: Coroutine[Any, Any, Any]) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._future: concurrent.futures.Future[Any] | None = None
        try:  # the loop that Serve's handles belong to in the router's process
            self._task = asyncio.get_running_loop().create_task(call)
        except RuntimeError:
            self._future = asyncio.run_coroutine_threadsafe(call, _loop())

    def __await__(self) -> Generator[Any, None, Any]:
        assert self._task is not None, "sent by a thread without an event loop"
        return self._task.__await__()

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the answer in a thread.

        Raises:
            TimeoutError: it did not come in time; the call goes on.
            Exception: what the call raises.
        """
        assert self._future is not None, "sent by a coroutine"
        return self._future.result(timeout_s)

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        (self._task or self._future).cancel()  # type: ignore[union-attr]  # it is one of them


class UnaryMethod:
    """One method of a deployment."""

    def __init__(self, handle: DeploymentHandle, name: str) -> None:
        self._method = handle.options(method_name=name)

    def remote(self, *args: Any, **kwargs: Any) -> UnaryCall:
        """Send the call."""
        return UnaryCall(self._call(args, kwargs))

    async def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        async with self._method.choose_replica() as chosen:
            return await self._method.dispatch(chosen, *args, **kwargs)


class UnaryHandle:
    """A deployment of one replica, in the place of its `DeploymentHandle`: `handle.method.remote(...)`."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> UnaryMethod:
        if name.startswith("_"):  # what pickle asks for
            raise AttributeError(name)
        method = UnaryMethod(self._handle, name)
        setattr(self, name, method)
        return method

    def __reduce__(self) -> tuple[type["UnaryHandle"], tuple[DeploymentHandle]]:
        return UnaryHandle, (self._handle,)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """An event loop for the calls of threads that have none."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="unary-calls", daemon=True).start()
    return loop
