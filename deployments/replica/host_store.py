"""The store as one host's replicas see it. Of those that share it, the holder of its lock writes.

Where hosts share none (`store.shared: false`), every replica serves the files of its host's versions to
starting replicas that lack them:

    GET /slipstream/versions/12                      names and sizes of its files
    GET /slipstream/versions/12/model.safetensors    bytes, or a range of them
"""

import asyncio
import os
import random
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
from pydantic import TypeAdapter
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response

from deployments.host.durable_files import locked
from deployments.host.logs import serve_logger
from deployments.protocol.poll import CatchUp, JoinAnswer, WriteVersion
from deployments.protocol.routing import KEY_HEADER, ReplicaEndpoint
from deployments.weights.store.checkpoint_files import check_files
from deployments.weights.store.owner import check_owner, own
from deployments.weights.store.versions import MANIFEST, DirectoryLock, Store
from deployments.weights.wire.checkpoint_schema import join_reasons

VERSIONS = "/slipstream/versions/"
WRITER = ".writer"  # delays a token by one piece at most
PIECE_BYTES = 1 << 20  # after this silence another holder is tried
SILENCE_S = 10.0  # without a byte from any holder: versions are stored some time after their commit
QUIET_S = 60.0
FETCH_S = 1500.0  # below the controller's limit for a catch-up
RETRY_S = 0.5
WEIGHTS = ".safetensors"

_SIZES = TypeAdapter(dict[str, int])
logger = serve_logger()


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
                sizes = await asyncio.to_thread(_sizes, directory)
                if not name:
                    response = JSONResponse(sizes)
                elif name in sizes:
                    response = _Pieces(directory / name)
        await response(scope, receive, send)


def _note(written: WriteVersion) -> bytes:
    return f"{written.version} {written.digest} of fleet {written.fleet_id}".encode()


class _Pieces(FileResponse):
    chunk_size = PIECE_BYTES


def _sizes(directory: Path) -> dict[str, int]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.stat().st_size for path in files}


def require_version(told: JoinAnswer | CatchUp, quiet_s: float = QUIET_S) -> DirectoryLock:
    """Check the files of a stored version at `path`, which stay until unlocked. Absent or different files are
    fetched from a holder, and checked before they get their name. Blocks.

    Raises:
        ValueError: it is damaged, or is not what was committed.
        OSError: it is not there and no holder gave it, or it cannot be read or written.
    """
    assert told.path is not None
    directory = Path(told.path)
    expected = told.version, told.fleet_id, told.digest
    try:
        return _checked(directory, *expected)
    except (OSError, ValueError) as error:
        if not told.holders or told.fleet_id is None:
            raise
        logger.info("asking %d replicas for version %d: %s", len(told.holders), told.version, error)
    store = Store(directory.parent)
    own(store.directory, told.fleet_id)
    store.remove_left()
    with suppress(FileNotFoundError):
        store.remove(told.version)
    try:
        with store.writing(told.version, told.fleet_id) as partial:
            _fetch(told, partial, quiet_s)
    except FileExistsError:  # another replica of this host had it first
        return _checked(directory, *expected)
    return DirectoryLock(directory)


def _checked(directory: Path, *expected: Any) -> DirectoryLock:
    """Lock first: every byte is read, and concurrent rounds may remove it meanwhile."""
    try:
        lock = DirectoryLock(directory)
    except FileNotFoundError:
        check_files(directory, *expected)
        raise
    try:
        check_files(directory, *expected)
    except (OSError, ValueError):
        lock.close()
        raise
    return lock


def _fetch(told: JoinAnswer | CatchUp, directory: Path, quiet_s: float) -> None:
    begin = time.monotonic()
    holders = random.sample(told.holders, len(told.holders))  # several may start at once
    problems: dict[str, str] = {}
    received, heard = 0, begin
    while True:
        for holder in holders:
            try:
                _fetch_from(holder, told.version, directory, begin + FETCH_S)
                check_files(directory, told.version, told.fleet_id, told.digest)
                return
            except (httpx.HTTPError, ValueError) as error:
                why = str(error).splitlines()[0]
                problems[holder.address] = f"{holder.address}: {type(error).__name__}: {why}"
                if not isinstance(error, httpx.HTTPError):  # what came is not what was committed
                    for name in _sizes(directory):
                        (directory / name).unlink()
        now, size = time.monotonic(), sum(_sizes(directory).values())
        if size > received:
            received, heard = size, now
        if now - heard > quiet_s or now - begin > FETCH_S:
            raise OSError(
                f"no replica gave version {told.version}: {join_reasons(sorted(problems.values()))}"
            )
        time.sleep(RETRY_S)


def _fetch_from(holder: ReplicaEndpoint, version: int, directory: Path, until: float) -> None:
    with httpx.Client(
        base_url=f"http://{holder.address}{VERSIONS}",
        headers={KEY_HEADER.decode(): holder.key},
        timeout=SILENCE_S,
        trust_env=False,
        verify=False,  # else it reads the host's certificates
    ) as client:
        sizes = _SIZES.validate_json(client.get(str(version)).raise_for_status().content)
        if MANIFEST not in sizes:
            raise ValueError(f"expected a version's files, got {sorted(sizes)[:3]}")
        for name in sorted(sizes, key=sizes.__getitem__):  # a holder may remove what is not open
            size = sizes[name]
            file = directory / name
            if not file.resolve().is_relative_to(directory.resolve()):
                raise ValueError(f"expected a file of a version, got {name!r}")
            file.parent.mkdir(parents=True, exist_ok=True)
            has = file.stat().st_size if name.endswith(WEIGHTS) and file.exists() else 0
            if has > size:
                raise ValueError(f"{name} has {has} bytes here, and {size} at {holder.address}")
            if has < size or size == 0:
                _fetch_file(client, f"{version}/{name}", file, has, until)


def _fetch_file(client: httpx.Client, name: str, file: Path, has: int, until: float) -> None:
    headers = {"range": f"bytes={has}-"} if has else {}
    with client.stream("GET", name, headers=headers) as answer, file.open("ab" if has else "wb") as target:
        if answer.raise_for_status().status_code != (206 if has else 200):
            raise ValueError(f"{name}: expected the bytes from {has} on, got status {answer.status_code}")
        for piece in answer.iter_raw(PIECE_BYTES):
            target.write(piece)
            if time.monotonic() > until:
                raise httpx.ReadTimeout(f"{name} took longer than {FETCH_S:g} s")
