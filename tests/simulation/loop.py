"""An event loop whose time is a number, and whose processes can stop, go on and die.

Everything that is created inside a process belongs to it, by a context variable. What a dead process would
run is dropped; what a stopped one would run waits until it goes on. Nothing ever sleeps: when nothing is
ready, time jumps to the next timer. One loop runs one schedule; the same seed runs the same steps.
"""

import asyncio
import contextvars
import heapq
import warnings
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

INBOX_S = 0.001


class Process:
    """An operating system's process, as far as its event loop is concerned."""

    def __init__(self, name: str, *, watched: bool = False) -> None:
        self.name = name
        self.alive = True
        self.stopped = False
        self.watched = watched  # what it does is looked at after each step
        self.parked: list[Handle] = []
        self.at_exit: list[Callable[[], None]] = []
        self.inbox: list[Callable[[], None]] = []  # messages that came while it stood still

    def __repr__(self) -> str:
        return self.name

    @property
    def runs(self) -> bool:
        return self.alive and not self.stopped


OUTSIDE = Process("outside", watched=True)  # the network, Serve, the oracle
PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("process", default=OUTSIDE)


class Handle:
    """A callback that is to run; what asyncio expects of one."""

    __slots__ = ("_args", "_callback", "_cancelled", "_when", "context")

    def __init__(self, callback: Any, args: Any, context: contextvars.Context, when: float = 0.0) -> None:
        self._callback, self._args, self.context, self._when = callback, args, context, when
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None

    def cancelled(self) -> bool:
        return self._cancelled

    def when(self) -> float:
        return self._when

    def run(self) -> None:
        if not self._cancelled:
            self.context.run(self._callback, *self._args)


class StepLimit(Exception):
    """A schedule that does not come to an end: something spins."""


class Loop(asyncio.AbstractEventLoop):
    """Runs callbacks in order, timers by time.

    Args:
        executor: runs what a process gives to a thread; it answers by the future.
        after_step: called after each callback of a process that is watched.
    """

    def __init__(
        self,
        executor: Callable[[Process, Callable[[], Any], asyncio.Future[Any]], None],
        after_step: Callable[[], None],
        max_steps: int = 2_000_000,
    ) -> None:
        self.now = 0.0
        self.steps = 0
        self.errors: list[str] = []
        self._max_steps = max_steps
        self._executor = executor
        self._after_step = after_step
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._count = 0
        self._tasks: list[asyncio.Task[Any]] = []  # of dead processes too: nothing of them may run when freed
        self._closed = False

    # -- what asyncio asks of a loop ----------------------------------------------------------

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._closed

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        return task

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        handle = Handle(callback, args, contextvars.copy_context() if context is None else context)
        self._ready.append(handle)
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        context = contextvars.copy_context() if context is None else context
        handle = Handle(callback, args, context, when)
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, handle))
        return handle

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()
        if not self._closed:
            action = partial(func, *args)
            # The journal's own thread goes to the simulated disk; all others to real files.
            journal = getattr(executor, "_thread_name_prefix", "") == "journal"
            action.any_thread = not journal  # type: ignore[attr-defined]
            self._executor(PROCESS.get(), action, future)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and not self._closed:
            self.errors.append(f"{context.get('message')}: {type(error).__name__}: {error}")

    async def shutdown_asyncgens(self) -> None: ...

    # -- processes ----------------------------------------------------------------------------

    def spawn(self, process: Process, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run it in this process."""
        context = contextvars.Context()
        context.run(PROCESS.set, process)
        return self.create_task(coroutine, context=context)

    def outside(self, action: Callable[[], None]) -> None:
        """Do it at once, and outside of the process that runs."""
        contextvars.Context().run(action)

    def kill(self, process: Process) -> None:
        process.alive, process.stopped = False, False
        process.parked.clear()
        at_exit, process.at_exit = process.at_exit, []
        for action in at_exit:
            action()
        self._empty_inbox(process)

    def stop(self, process: Process) -> None:
        process.stopped = True

    def go_on(self, process: Process) -> None:
        if process.stopped:
            process.stopped = False
            self._ready.extend(process.parked)
            process.parked = []
            self._empty_inbox(process)

    def _empty_inbox(self, process: Process) -> None:
        """Threads of its own read its sockets: what is overdue in the event loop runs before that."""
        inbox, process.inbox = process.inbox, []
        for message in inbox:
            self.call_later(INBOX_S, message, context=contextvars.Context())

    # -- running ------------------------------------------------------------------------------

    def run_until(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Run until it is true, or this time has come; which of the two."""
        asyncio._set_running_loop(self)
        try:
            while not done():
                if not self._ready and not self._next_timer(limit_s):
                    return False
                self._step(self._ready.popleft())
            return True
        finally:
            asyncio._set_running_loop(None)

    def close(self) -> None:
        """Forget everything: nothing of this schedule runs any more."""
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        with warnings.catch_warnings():
            # A call that a `finally` begins here, without a running loop, is not awaited.
            warnings.simplefilter("ignore", RuntimeWarning)
            for task in self._tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                if not task.done():
                    with suppress(RuntimeError):  # it waits again in its `finally`
                        task.get_coro().close()
        self._tasks.clear()

    def _next_timer(self, limit_s: float) -> bool:
        while self._timers:
            when, _, handle = self._timers[0]
            if when > limit_s:
                self.now = limit_s
                return False
            heapq.heappop(self._timers)
            if not handle._cancelled:
                self.now = max(self.now, when)
                self._ready.append(handle)
                return True
        self.now = limit_s
        return False

    def _step(self, handle: Handle) -> None:
        process = handle.context.get(PROCESS, OUTSIDE)
        if not process.alive:
            return
        if process.stopped:
            process.parked.append(handle)
            return
        self.steps += 1
        if self.steps > self._max_steps:
            raise StepLimit(f"{self.steps} steps in {self.now:.1f} s")
        handle.run()
        if process.watched or self.errors:
            self._after_step()
