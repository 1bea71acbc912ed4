"""A Hugging Face checkpoint directory that somebody else wrote, as the parts of a round.

    confined     the directory is below a configured root, whatever links lead to it
    open         which files it consists of, and whether each is complete, by their headers alone
    stated       the digests of a part's tensors, which each replica's own reading must equal; of a stored
                 version they must be those of its manifest

Nothing here loads torch: it runs in a router, beside requests. It blocks as long as the disk does.
"""

import fcntl
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from deployments.protocol.poll import FilePart
from deployments.weights.store.checkpoint_files import files_of, open_file, parts_of, read_into
from deployments.weights.store.manifest import VersionManifest
from deployments.weights.store.versions import MANIFEST
from deployments.weights.wire.digest_definition import digest_bytes

PART_BYTES = 256 << 20  # what a replica stages at a time, and what one deadline is for
Identity = tuple[int, int, int, int]  # device, inode, size, time of the last change in ns


def confined(path: str, roots: Sequence[Path]) -> Path:
    """The path without symbolic links, if it is a configured root or below one.

    Raises:
        ValueError: it is not; whether it exists is not said.
    """
    allowed = [str(root) for root in roots]
    if "\0" in path or not os.path.isabs(path):
        raise ValueError(f"path: expected an absolute path below one of {allowed}, got {path!r:.200}")
    try:
        resolved = Path(path).resolve()
    except (OSError, RuntimeError) as error:  # a loop of links, a name that is too long
        raise ValueError(f"path: {path!r:.200} cannot be resolved: {error}") from error
    if not _is_below(resolved, roots):
        raise ValueError(f"path: expected a directory below one of {allowed}, got {path!r:.200}")
    return resolved


def _is_below(resolved: Path, roots: Sequence[Path]) -> bool:
    return any(resolved.is_relative_to(root.resolve()) for root in roots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A directory whose headers are in order. The directory stays locked against the store until `close`."""

    directory: Path
    parts: Sequence[FilePart]  # without digests
    identities: Mapping[Path, Identity]  # of the files, when their headers were read
    lock: "DirectoryLock"
    written: VersionManifest | None = None  # what a stored version must hold; None: it is no stored version

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @classmethod
    def open(cls, path: str, roots: Sequence[Path], part_bytes: int = PART_BYTES) -> Self:
        """Read the headers of a directory's files.

        Raises:
            ValueError: outside the roots, no directory, no or not all safetensors files, a file that is cut
                off or has no header, or other tensors than the manifest has; says what was expected.
            OSError: it cannot be read.
        """
        directory = confined(path, roots)
        if not directory.exists():
            raise ValueError(f"{directory} does not exist on the router's host")
        if not directory.is_dir():
            raise ValueError(f"{directory} must be a checkpoint directory, and is a file")
        lock = DirectoryLock(directory)
        try:
            files = [_confined_file(file, roots) for file in files_of(directory)]
            identities = {file: _identity(file) for file in files}
            parts = list(parts_of(directory, files, part_bytes))
            if not parts:
                raise ValueError(f"{directory} has no tensors")
            written = _manifest_in(directory, roots)
            if written is not None:
                _check_names(parts, written)
        except BaseException:  # whatever it was: nobody else would release the lock
            lock.close()
            raise
        return cls(directory=directory, parts=parts, identities=identities, lock=lock, written=written)

    def changed(self) -> str | None:
        """Which file is not the one whose header was read; None: all are."""
        for file, identity in self.identities.items():
            with suppress(OSError):
                if _identity(file) == identity:
                    continue
            return f"{file} was changed while it was read"
        return None

    def close(self) -> None:
        """Unlock the directory."""
        self.lock.close()


class DirectoryLock:
    """Keeps the controller from removing a stored version that is being read: as `Store.reading`, for any
    directory and without a wait.

    Raises:
        ValueError: it is being removed.
        OSError: it cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._descriptor: int | None = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ValueError(f"{directory} is being removed from the store") from None
        except OSError:
            return  # a file system without locks: nobody of ours locks there either

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:  # of a reading that came too late for whoever wanted it
        if getattr(self, "_descriptor", None) is not None:
            self.close()


def stated(part: FilePart, written: VersionManifest | None = None) -> FilePart:
    """The same part with the digests of its tensors. Reads their bytes, one tensor at a time.

    Args:
        written: with which digests the tensors were written; None: not known.

    Raises:
        ValueError: the file ends before a tensor does, or a tensor is not the one that was written.
        OSError: it cannot be read.
    """
    buffer = np.empty(max((end - begin for begin, end in part.ranges), default=0), dtype=np.uint8)
    digests = []
    with open_file(Path(part.path)) as file:
        for begin, end in part.ranges:
            data = buffer[: end - begin]
            try:
                read_into(file, begin, data.data)
            except ValueError as error:
                raise ValueError(f"{part.path}: {error}") from error
            digests.append(f"{digest_bytes(data):016x}")
    if written is not None:
        _check_digests(part, digests, written)
    return replace(part, digests=tuple(digests))


def _manifest_in(directory: Path, roots: Sequence[Path]) -> VersionManifest | None:
    """Other programs may write a file of that name, which states nothing here."""
    file = directory / MANIFEST
    with suppress(FileNotFoundError, ValueError), open_file(_confined_file(file, roots)) as content:
        return VersionManifest.decode(content.readall())
    return None


def _check_names(parts: Sequence[FilePart], written: VersionManifest) -> None:
    found = {name for part in parts for name in part.names}
    for name in sorted(found ^ written.tensors.keys()):
        problem = "is not in its manifest" if name in found else "was written and is gone"
        raise ValueError(_damaged(parts[0], written, f"{name!r} {problem}"))


def _check_digests(part: FilePart, digests: Sequence[str], written: VersionManifest) -> None:
    for name, found in zip(part.names, digests, strict=True):
        tensor = written.tensors.get(name)
        if tensor is not None and tensor.digest != found:
            problem = f"{name!r} was written with digest {tensor.digest} and has {found}"
            raise ValueError(_damaged(part, written, problem))


def _damaged(part: FilePart, written: VersionManifest, problem: str) -> str:
    return (
        f"version {written.version} in {part.directory} is damaged: {problem}; publish another version. If "
        f"its files were changed on purpose, publish a copy without {MANIFEST}"
    )


def _confined_file(file: Path, roots: Sequence[Path]) -> Path:
    resolved = file.resolve()  # the hub's cache has links to its blobs
    if not _is_below(resolved, roots):
        raise ValueError(f"{file} is a link to a file outside of {[str(root) for root in roots]}")
    if not stat.S_ISREG(resolved.stat().st_mode):
        raise ValueError(f"{file} must be a file")
    return resolved


def _identity(file: Path) -> Identity:
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
