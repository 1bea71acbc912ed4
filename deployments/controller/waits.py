"""Those who wait for the ledger: each is woken when its own wait is over, and nobody for somebody else's.

    change ─► one look at all who wait, for all changes of this moment ─► those who are ready go on
                                                                          a few at a time

What a look costs is one condition for each. A thousand coroutines that wake, look and wait again would cost
ten times that, for each heartbeat of each of a thousand replicas.
"""

import asyncio
from collections import deque
from collections.abc import Callable

AT_ONCE = 32  # of those who are ready; others are answered between them


class Waits:
    """The waits of one event loop."""

    def __init__(self) -> None:
        self._conditions: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._ready: deque[asyncio.Future[None]] = deque()
        self._looks = self._releases = False  # soon

    async def wait(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Until it is true or the time is over.

        Raises:
            Exception: what `ready` raises.
        """
        if ready():
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._conditions[woken] = ready
        try:
            async with asyncio.timeout(timeout_s):
                await woken
        except TimeoutError:
            pass
        finally:
            self._conditions.pop(woken, None)

    def look_soon(self) -> None:
        """Something changed: look once what runs now has ended."""
        if self._conditions and not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_soon(self._look)

    def end_all(self) -> None:
        """Nobody is to wait any longer."""
        self._ready.extend(self._conditions)
        self._conditions.clear()
        self._release()

    def _look(self) -> None:
        self._looks = False
        for woken, ready in list(self._conditions.items()):
            try:
                if not ready():
                    continue
            except Exception as error:  # it is its caller's
                if not woken.done():
                    woken.set_exception(error)
            self._ready.append(woken)
            del self._conditions[woken]
        if not self._releases:
            self._release()

    def _release(self) -> None:
        """Let some go on, and the others after what has come meanwhile."""
        for _ in range(min(AT_ONCE, len(self._ready))):
            woken = self._ready.popleft()
            if not woken.done():
                woken.set_result(None)
        self._releases = bool(self._ready)
        if self._releases:
            asyncio.get_running_loop().call_soon(self._release)
