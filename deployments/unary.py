"""Calls of a deployment that a caller which stands still cannot stop for everybody else.

`DeploymentHandle.remote` sends a call as a streaming generator (`handle_request_with_rejection` in Serve),
at the end of which Ray 2.60 waits until the caller has confirmed what it got
(`TaskGeneratorBackpressureWaiter::WaitAllObjectsReported`). It waits on the event loop of the process that
answers. A caller that is stopped or frozen in the middle of a call thereby stops the controller, for as long
as it lasts: no replica can report, and all are taken for lost. A call to a replica on which a place was
reserved before (`choose_replica`, `dispatch`) is an ordinary one, which nobody waits for.
"""

import asyncio
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any, TypeVar

from ray.serve.handle import DeploymentHandle

Result = TypeVar("Result")


class UnaryMethod:
    """One method of a deployment."""

    def __init__(self, handle: DeploymentHandle, name: str) -> None:
        self._method = handle.options(method_name=name)

    def remote(self, *args: Any, **kwargs: Any) -> asyncio.Task[Any]:
        """Send the call, from a coroutine."""
        return asyncio.create_task(self._call(args, kwargs))

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


def run_sync(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine for a thread that has no event loop, and wait for its result."""
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """An event loop for the calls of threads that have none."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="unary-calls", daemon=True).start()
    return loop
