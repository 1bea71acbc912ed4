"""The files of adapters: copied before a replica hears of them, removed when no replica has them.

Which ones are needed is the ledger's decision (`deployments.ledger.adapters`). The disk is read and changed
in threads.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from deployments.controller.removal import Removal
from deployments.protocol.adapters import AdapterFiles
from deployments.protocol.errors import Conflict, FleetUnavailable, InvalidRequest, NotFound
from deployments.weights.store.adapter_bytes import CannotWrite
from deployments.weights.store.adapter_store import AdapterStore, Incomplete

DISK_S = 120.0  # for one adapter; a disk that takes longer hangs
THREADS = 8  # one that a disk does not answer is lost until it does
LAG_S = 10.0  # a shared file system may show a directory this much later than its writer
RETRY_S = 0.1

T = TypeVar("T")


class AdapterKeeper:
    """Copies adapters into the fleet's store, and removes them.

    Args:
        roots: directories below which the users' adapters are.
        needed: the ids whose files must stay.
        lag_s: how long files that are not complete are waited for.
        disk_s: how long a disk may take to answer.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        directory: Path,
        roots: Sequence[Path],
        needed: Callable[[], set[int]],
        lag_s: float = LAG_S,
        clock: Callable[[], float] = time.monotonic,
        disk_s: float = DISK_S,
    ) -> None:
        self._store = AdapterStore(directory)
        self._roots = tuple(roots)
        self._lag_s = lag_s
        self._disk_s = disk_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="adapters")
        self._clock = clock
        self.removal = Removal(  # asks anew before each: one may be needed by then
            "adapters",
            self._store.ids,
            lambda ids: (each for each in ids if each not in needed()),
            self._store.remove,
        )

    async def copy(self, path: str, adapter_id: int, digest: str = "") -> AdapterFiles:
        """Copy an adapter, for replicas to read; waits a while for files that are not complete.
        `complete` follows.

        Args:
            digest: as in `AdapterStore.copy`.

        Raises:
            NotFound: there is no such directory.
            InvalidRequest: outside of the roots, not an adapter, or not complete in time.
            FleetUnavailable: there is no space for the copy, or it cannot be written.
            Conflict: the disk does not answer.
        """
        if not path or "\0" in path or not Path(path).is_absolute():
            raise InvalidRequest(f"lora_path: expected an absolute path, got {path[:200]!r}")
        until = self._clock() + self._lag_s
        while True:
            try:
                copying = partial(self._store.copy, Path(path), self._roots, adapter_id, digest)
                return await self._on_disk(copying, path)
            except (Incomplete, FileNotFoundError) as error:  # as it is being replaced
                if self._clock() > until:
                    there = await self._on_disk(Path(path).is_dir, path)
                    kind = InvalidRequest if there else NotFound
                    raise kind(f"lora_path: {error} (waited {self._lag_s:g} s)") from error
            except CannotWrite as error:
                raise _no_space(error) from error
            except (OSError, ValueError) as error:
                raise InvalidRequest(str(error)) from error
            await asyncio.sleep(RETRY_S)

    async def complete(self, adapter_id: int) -> None:
        """The copy is durable. Raises FleetUnavailable, or Conflict as `copy`."""
        try:
            await self._on_disk(partial(self._store.complete, adapter_id), str(self._store.directory))
        except CannotWrite as error:
            raise _no_space(error) from error

    async def _on_disk(self, work: Callable[[], T], what: str) -> T:
        """Its result. Where a disk hangs, the name that is being loaded is free again, and the loop's own
        threads are there for what else the controller does."""
        try:
            async with asyncio.timeout(self._disk_s):  # not wait_for, which can swallow a cancellation
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except TimeoutError as error:
            raise Conflict(f"{what}: the disk has not answered within {self._disk_s:g} s") from error

    async def aclose(self) -> None:
        """Wait for the removal that is running."""
        await self.removal.aclose()
        self._threads.shutdown(wait=False)


def _no_space(error: CannotWrite) -> FleetUnavailable:
    return FleetUnavailable(
        f"the fleet cannot copy an adapter: {error}; it serves on. Free space on the disk of 'store.path'",
        {"disk": str(error)},
    )
