"""The files that the controller keeps: this fleet's versions, and its copies of adapters.

The ledger decides whose a version is (`deployments.ledger.stored_versions`) and which files are needed.
Threads read and change the disk.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from deployments.host.logs import serve_logger
from deployments.ledger.ledger import Ledger
from deployments.protocol.adapters import AdapterFiles
from deployments.protocol.errors import Conflict, FleetUnavailable, InvalidRequest, JournalError, NotFound
from deployments.weights.store import adapter_store
from deployments.weights.store.owner import OWNER, check_owner, claim, has_owner, hold
from deployments.weights.store.versions import Store, VersionManifest

PREDECESSOR_S = 10.0
DISK_S = 120.0  # a disk that takes longer for one adapter hangs
ADAPTERS = "adapters"
THREADS = 8  # a hanging disk blocks one per adapter

T = TypeVar("T")
logger = serve_logger()


def hold_claim(directory: Path) -> int | None:
    return hold(directory, PREDECESSOR_S)


class StoreKeeper:
    """Claims, reads and empties the store, and copies adapters into it, before a replica hears of them.

    Args:
        state_dir: named where the store is refused.
        keep: versions that stay, beside those that are being read.
        hold_claim: keeps other processes off the store until its result is closed.
        adapter_roots: directories below which users' adapters are.
        lag_s: how long to wait for incomplete files of an adapter.
    """

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        state_dir: Path,
        keep: int,
        hold_claim: Callable[[Path], int | None] = hold_claim,
        *,
        adapter_roots: Sequence[Path] = (),
        lag_s: float = adapter_store.LAG_S,
        clock: Callable[[], float] = time.monotonic,
        disk_s: float = DISK_S,
    ) -> None:
        self._store = store
        self._state_dir = state_dir
        self._ledger = ledger
        self._hold_claim = hold_claim
        self._held: int | None = None
        self._adapters = adapter_store.AdapterStore(store.directory / ADAPTERS)
        self._pass: asyncio.Task[None] | None = None
        self._problem: OSError | None = None
        self._keep = keep
        self._roots = tuple(adapter_roots)
        self._lag_s = lag_s
        self._clock = clock
        self._disk_s = disk_s
        # Own threads: a hanging disk leaves the event loop's free.
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="adapters")

    def remove_old(self) -> None:
        """Runs in the background, one pass at a time."""
        if self._pass is None or self._pass.done():
            self._pass = asyncio.get_running_loop().create_task(self._remove_old())

    async def _remove_old(self) -> None:
        before, self._problem = self._problem, None
        try:
            await asyncio.to_thread(self.check_owner)  # an operator may have given the store away
            self._find_stored(await asyncio.to_thread(self._newer))
            for version in await asyncio.to_thread(self._older):
                await self._remove(self._store.remove, version)  # one that is being read stays for now
            for adapter_id in await asyncio.to_thread(self._adapters.ids):
                if adapter_id not in self._ledger.adapter_ids():  # asked each time: it may be needed again
                    await self._remove(self._adapters.remove, adapter_id)
        except OSError as error:
            self._problem = error
        if self._problem is not None and before is None:
            logger.warning("old versions or adapters stay in the store: %s", self._problem)

    async def _remove(self, remove: Callable[[int], object], number: int) -> None:
        try:
            with suppress(FileNotFoundError):
                await asyncio.to_thread(remove, number)
        except OSError as error:
            self._problem = error

    async def aclose(self) -> None:
        if self._pass is not None:
            await asyncio.gather(self._pass, return_exceptions=True)

    def check_owner(self) -> None:
        """Raises JournalError: the store is no longer this fleet's."""
        check_owner(self._store.directory, self._ledger.state.fleet_id)

    def claim(self) -> None:
        """Claim the store, or check the claim, when the controller starts. Reads the disk.

        Raises:
            JournalError: it belongs to another fleet, has versions of an unknown one, has none where this
                fleet stored some, is used by another controller, or cannot be read or written.
        """
        if not has_owner(self._store.directory, self._ledger.state.fleet_id):
            self._claim()
        self._held = self._hold_claim(self._store.directory)
        self._find_stored(self._newer())

    def release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            os.close(held)
        self._threads.shutdown(wait=False)

    def _claim(self) -> None:
        directory, fleet_id = self._store.directory, self._ledger.state.fleet_id
        stored = self._ledger.state.stored
        versions = self._store.list()
        if stored is not None and Path(stored.path).parent == directory and not versions:
            self.check_owner()
        if versions:
            raise JournalError(
                f"the store {directory} has versions {versions} and no {OWNER}, which names their fleet; the "
                f"journal in {self._state_dir} is of fleet {fleet_id}. To start anew, move the store away or "
                "set 'store.path' to another directory; to begin with the weights of one, move it away and "
                f'set \'model\' to it; to continue, write {OWNER}: {{"fleet_id": "{fleet_id}"}}'
            )
        claim(directory, fleet_id, self._state_dir)

    def source(self, version: int) -> str:
        """The directory of a stored version. Raises InvalidRequest: absent, another fleet's, or an unreadable
        manifest."""
        stored = self.versions()
        if version not in stored:
            raise InvalidRequest(
                f"version: expected one in the store {stored}, got {version}",
                {"expected": stored, "actual": version},
            )
        if isinstance(found := self._own(version), str):
            raise InvalidRequest(
                f"version {version} cannot be rolled back to: {found}; roll back to another one"
            )
        return str(self._store.path_of(version))

    def versions(self) -> list[int]:
        """Oldest first. Reads the disk."""
        return list(self._store.list())

    def _own(self, version: int) -> VersionManifest | str:
        """Or why there is none: an operator may have copied a version to the store."""
        try:
            manifest = self._store.manifest_of(version)
        except (OSError, ValueError) as error:
            return f"its manifest cannot be read: {error}"
        if manifest.fleet_id != self._ledger.state.fleet_id:
            return f"its manifest is of {manifest.owner}"
        return manifest if manifest.version == version else f"its manifest is of version {manifest.version}"

    def _find_stored(self, newer: Mapping[str, VersionManifest]) -> None:
        """A writer may have exited before it reported its version, or this process before it heard."""
        for path, each in newer.items():
            self._ledger.find_stored(each.version, path, each.label, each.digest)

    def _newer(self) -> dict[str, VersionManifest]:
        newest, found = self._ledger.state.stored_version, dict[str, VersionManifest]()
        for version in self._store.list():
            if version > newest and isinstance(manifest := self._own(version), VersionManifest):
                found[str(self._store.path_of(version))] = manifest
        return found

    def _older(self) -> list[int]:
        newest = self._ledger.state.stored_version
        known = [version for version in self._store.list() if version <= newest]
        return [each for each in known[: -self._keep] if isinstance(self._own(each), VersionManifest)]

    async def copy_adapter(self, path: str, adapter_id: int, digest: str = "") -> AdapterFiles:
        """Copy an adapter for replicas to read; waits for incomplete files. `complete_adapter` follows.

        Raises:
            NotFound: there is no such directory.
            InvalidRequest: outside of the roots, not an adapter, or not complete in time.
            FleetUnavailable: the copy cannot be written.
            Conflict: the disk hangs, or the store is another fleet's.
        """
        if not path or "\0" in path or not Path(path).is_absolute():
            raise InvalidRequest(f"lora_path: expected an absolute path, got {path[:200]!r}")
        copying = partial(self._adapters.copy, Path(path), self._roots, adapter_id, digest)
        try:
            await self._on_disk(self.check_owner, path)
        except OSError as error:
            raise Conflict(str(error)) from error
        try:
            return await adapter_store.until_complete(
                lambda: self._on_disk(copying, path), self._lag_s, self._clock
            )
        except adapter_store.Incomplete as error:
            there = await self._on_disk(Path(path).is_dir, path)
            kind = InvalidRequest if there else NotFound
            raise kind(f"lora_path: {error}") from error
        except adapter_store.CannotWrite as error:
            raise _no_space(error) from error
        except (OSError, ValueError) as error:
            raise InvalidRequest(str(error)) from error

    async def complete_adapter(self, adapter_id: int) -> None:
        """Make the copy durable. Raises FleetUnavailable, or Conflict as `copy_adapter`."""
        try:
            await self._on_disk(partial(self._adapters.complete, adapter_id), str(self._adapters.directory))
        except adapter_store.CannotWrite as error:
            raise _no_space(error) from error

    async def _on_disk(self, work: Callable[[], T], what: str) -> T:
        try:
            async with asyncio.timeout(self._disk_s):  # wait_for can swallow a cancellation
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except TimeoutError as error:
            raise Conflict(f"{what}: the disk has not answered within {self._disk_s:g} s") from error


def _no_space(error: adapter_store.CannotWrite) -> FleetUnavailable:
    return FleetUnavailable(
        f"the fleet cannot copy an adapter: {error}. Serving continues. Free space on the disk of "
        "'store.path'",
        {"disk": str(error)},
    )
