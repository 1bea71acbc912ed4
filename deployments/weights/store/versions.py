"""The last committed versions on disk, as ordinary Hugging Face checkpoint directories.

    v00000012/          config.json, *.safetensors, tokenizer files, manifest.json
    .v00000013.a1b2c3d4.partial/  being written; renamed when everything is on the disk

A writer that was taken for lost may go on beside the one that took its place: no two share a directory, and
the first that is complete counts. A complete version ends the writes of older ones, which nobody needs any
more, and leaves those of newer ones alone.

The trainer or a replica writes, after the commit and off the critical path; starting replicas read. The
controller removes versions, because it alone knows which of them a replica was told to load. A trainer that
reads holds a shared lock on the directory, so that it is not removed meanwhile.
"""

import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deployments.host.durable_files import replacing
from deployments.weights.store.manifest import VersionManifest

MANIFEST = "manifest.json"
LOCK_S = 60.0  # a version is renamed and removed in less
_LOCK_POLL_S = 0.05

_NAME = re.compile(r"v(\d{8,})")
_PARTIAL = re.compile(r"\.v(\d{8,})(?:\.[0-9a-f]{8})?\.partial")


class Store:
    """A directory of versions. Safe for any number of writers and readers, in any processes of one host or
    shared disk."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def list(self) -> Sequence[int]:
        """Complete versions, oldest first."""
        if not self.directory.is_dir():
            return []
        names = (_NAME.fullmatch(entry.name) for entry in self.directory.iterdir())
        return sorted(int(name[1]) for name in names if name is not None)

    def path_of(self, version: int) -> Path:
        """The directory of a version.

        Raises:
            FileNotFoundError: the version is not in the store; names the versions that are.
        """
        path = self._path(version)
        if not path.is_dir():
            raise FileNotFoundError(
                f"version {version} is not in {self.directory}, expected one of {self.list()}"
            )
        return path

    def manifest_of(self, version: int) -> VersionManifest:
        """The manifest of a version.

        Raises:
            FileNotFoundError: the version is not in the store; names the versions that are.
            ValueError: its manifest cannot be read; names the file.
        """
        file = self.path_of(version) / MANIFEST
        try:
            return VersionManifest.decode(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    @contextmanager
    def writing(self, manifest: VersionManifest) -> Iterator[Path]:
        """A directory to write the checkpoint into; it becomes the version when the block ends without an
        exception, and is removed otherwise.

        Raises:
            FileExistsError: the version is complete already, or another writer was quicker.
            OSError: the directory cannot be written, or a newer version was complete first.
        """
        final = self._path(manifest.version)
        if final.exists():
            raise FileExistsError(f"version {manifest.version} is in {self.directory} already")
        partial = self.directory / f".{final.name}.{uuid.uuid4().hex[:8]}.partial"
        partial.mkdir(parents=True)
        try:
            with replacing(final, partial):
                yield partial
                (partial / MANIFEST).write_text(manifest.encode())
        except OSError as error:
            if final.exists():  # whose writer removed what is partial
                raise FileExistsError(f"version {manifest.version} is in {self.directory} already") from error
            raise
        self._remove_partial(manifest.version)

    @contextmanager
    def reading(self, version: int) -> Iterator[Path]:
        """The directory of a version, which is not removed inside the block.

        Raises:
            FileNotFoundError: the version is not in the store; names the versions that are.
            TimeoutError: somebody removes it and does not come to an end.
        """
        path = self.path_of(version)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            _lock_for_reading(descriptor, path)
            yield self.path_of(version)  # it may have been removed before the lock was ours
        finally:
            os.close(descriptor)

    def remove(self, version: int) -> bool:
        """Remove a version. False: it is being read, and stays.

        Raises:
            OSError: it is not there, or cannot be removed.
        """
        path = self._path(version)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            partial = self.directory / f".{path.name}.partial"
            path.rename(partial)  # a version that is half removed is never listed
            shutil.rmtree(partial, ignore_errors=True)  # what stays is removed by the next writer
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _remove_partial(self, complete: int) -> None:
        """Remove what is partial up to this version: a crash left it, or its writer is too late. A newer one
        may be in the middle of its write."""
        for entry in self.directory.iterdir():
            name = _PARTIAL.fullmatch(entry.name)
            if name is not None and int(name[1]) <= complete:
                shutil.rmtree(entry, ignore_errors=True)

    def _path(self, version: int) -> Path:
        return self.directory / f"v{version:08d}"


def _lock_for_reading(descriptor: int, path: Path) -> None:
    # Not a lock that waits: whoever holds it may stand still, and the caller would with it.
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} has been locked for {LOCK_S:g} s by whoever removes it") from None
        time.sleep(_LOCK_POLL_S)
