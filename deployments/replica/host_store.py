"""The store as one host's replicas see it. Of those that share it, the holder of its lock writes.

Where hosts share none (`store.shared: false`), every replica serves the files of its host's versions to
starting replicas and trainers that lack them, see `deployments.weights.store.version_fetcher`.
"""

import asyncio
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response

from deployments.host.durable_files import locked
from deployments.protocol.poll import WriteVersion
from deployments.weights.store.owner import check_owner, own
from deployments.weights.store.version_fetcher import VERSIONS, sizes_of
from deployments.weights.store.versions import Store

WRITER = ".writer"
PIECE_BYTES = 1 << 20  # delays a token by one piece at most


class HostStore:
    """`keep`: versions kept in this host's own store; None: hosts share it, and the controller removes old
    ones."""

    def __init__(self, directory: Path, keep: int | None) -> None:
        self.directory = directory
        self._store = Store(directory)
        self._keep = keep

    def lock(self, fleet_id: str) -> int | None:
        """Its descriptor: until `unlock`, no other replica writes here. None: another one does. Blocks.
        Raises OSError (unwritable) or JournalError (not this fleet's)."""
        if self._keep is None:
            check_owner(self.directory, fleet_id)
        else:
            own(self.directory, fleet_id)
        with ExitStack() as stack:
            descriptor = os.open(self.directory / WRITER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, descriptor)
            if locked(descriptor) is False:  # without locks several write, and the first to finish counts
                return None
            if self._keep is not None:
                self._store.remove_old(fleet_id, self._keep)
            stack.pop_all()
            return descriptor

    def find(self, wanted: WriteVersion) -> str | None:
        """The version's directory, if it was written last. Blocks."""
        # Not the directory itself: a network file system may hide it from other hosts for a minute.
        with suppress(FileNotFoundError):
            if (self.directory / WRITER).read_bytes() == _note(wanted):
                return str(self._store.path(wanted.version))
        return None

    def unlock(self, descriptor: int, written: WriteVersion | None) -> None:
        """Blocks."""
        with suppress(OSError):  # a full disk: others then look for the version themselves
            if written is not None:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, _note(written), 0)
        os.close(descriptor)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        number, _, name = scope["path"].removeprefix(VERSIONS).partition("/")
        response: Response = PlainTextResponse(f"{scope['path']} is not in this host's store", 404)
        if number.isdecimal():
            with suppress(OSError):  # it is being removed
                directory = self._store.path_of(int(number))
                sizes = await asyncio.to_thread(sizes_of, directory)
                if not name:
                    response = JSONResponse(sizes)
                elif name in sizes:
                    response = _Pieces(directory / name)
        await response(scope, receive, send)


def _note(written: WriteVersion) -> bytes:
    return f"{written.version} {written.digest} of fleet {written.fleet_id}".encode()


class _Pieces(FileResponse):
    chunk_size = PIECE_BYTES
