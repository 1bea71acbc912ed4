"""Removes from a directory what is no longer needed, off the critical path.

What may go is decided on the event loop, between two calls; the disk is read and changed in a thread.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, TypeVar

from deployments.host.logs import serve_logger

T = TypeVar("T")
logger = serve_logger()


class Removal(Generic[T]):
    """One pass at a time.

    Args:
        what: in the log, if some cannot be removed.
        listed: in a thread: what is there.
        removable: the ids that may go, of what is there.
        remove: in a thread. Raises OSError.
    """

    def __init__(
        self,
        what: str,
        listed: Callable[[], T],
        removable: Callable[[T], Iterable[int]],
        remove: Callable[[int], object],
    ) -> None:
        self._what, self._listed, self._removable, self._remove = what, listed, removable, remove
        self._pass: asyncio.Task[None] | None = None
        self._problem: OSError | None = None

    def start(self) -> None:
        """Begin a pass, unless one is running."""
        if self._pass is None or self._pass.done():
            self._pass = asyncio.get_running_loop().create_task(self._run())

    async def aclose(self) -> None:
        """Wait for the pass that is running."""
        if self._pass is not None:
            await asyncio.gather(self._pass, return_exceptions=True)

    async def _run(self) -> None:
        before, self._problem = self._problem, None
        try:
            for each in self._removable(await asyncio.to_thread(self._listed)):
                try:
                    with suppress(FileNotFoundError):  # somebody else removed it
                        await asyncio.to_thread(self._remove, each)
                except OSError as error:
                    self._problem = error
        except OSError as error:
            self._problem = error
        if self._problem is not None and before is None:
            logger.warning("old %s stay in the store: %s", self._what, self._problem)
