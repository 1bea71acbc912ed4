"""A stored version, from another host's replica if this host lacks it (`store.shared: false`):

GET /slipstream/versions/12                      names and sizes of its files
GET /slipstream/versions/12/model.safetensors    bytes, or a range of them
"""

import random
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from pydantic import TypeAdapter

from deployments.host.logs import serve_logger
from deployments.protocol.poll import StoredVersion
from deployments.protocol.routing import KEY_HEADER, ReplicaEndpoint
from deployments.weights.store.checkpoint_files import check_files
from deployments.weights.store.owner import own
from deployments.weights.store.versions import MANIFEST, DirectoryLock, Store
from deployments.weights.wire.checkpoint_schema import join_reasons

VERSIONS = "/slipstream/versions/"
SILENCE_S = 10.0  # then another holder is tried
QUIET_S = 60.0  # without a byte from any holder: versions are stored some time after their commit
FETCH_S = 1500.0  # below the controller's limit for a catch-up, and the trainer's for a start
RETRY_S = 0.5
WEIGHTS = ".safetensors"

_SIZES = TypeAdapter(dict[str, int])
logger = serve_logger()


def sizes_of(directory: Path) -> dict[str, int]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.stat().st_size for path in files}


def require_version(told: StoredVersion, quiet_s: float = QUIET_S) -> DirectoryLock:
    """Check the files of a stored version at `path`, which stay until unlocked. Absent or different files are
    fetched from a holder, and checked before they get their name. Blocks.

    Raises:
        ValueError: it is damaged, or is not what was committed.
        OSError: it is not there and no holder gave it, or it cannot be read or written.
    """
    directory = Path(told.path)
    expected = told.version, told.fleet_id, told.digest
    try:
        return _checked(directory, *expected)
    except (OSError, ValueError) as error:
        if not told.holders:
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


def _fetch(told: StoredVersion, directory: Path, quiet_s: float) -> None:
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
                    for name in sizes_of(directory):
                        (directory / name).unlink()
        now, size = time.monotonic(), sum(sizes_of(directory).values())
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
        sizes = _SIZES.validate_json(b"".join(_pieces(client, str(version), until)))
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
                with file.open("ab" if has else "wb") as target:
                    target.writelines(_pieces(client, f"{version}/{name}", until, has))


def _pieces(client: httpx.Client, name: str, until: float, has: int = 0) -> Iterator[bytes]:
    """What is at a name, from byte `has` on."""
    with client.stream("GET", name, headers={"range": f"bytes={has}-"} if has else {}) as answer:
        if answer.raise_for_status().status_code != (206 if has else 200):
            raise ValueError(f"{name}: expected the bytes from {has} on, got status {answer.status_code}")
        for piece in answer.iter_raw():
            yield piece
            if time.monotonic() > until:
                raise httpx.ReadTimeout(f"{name} took longer than {FETCH_S:g} s")
