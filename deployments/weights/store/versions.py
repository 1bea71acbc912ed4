"""The last committed versions on disk, as ordinary Hugging Face checkpoint directories.

    v00000012/          config.json, *.safetensors, tokenizer files, manifest.json
    .v00000013.partial/ being written; renamed when everything is on the disk

The trainer writes, after the commit and off the critical path; the controller and starting replicas
read. A reader holds a shared lock on the directory, so that retention leaves it alone.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
KEEP = 3

_NAME = re.compile(r"v(\d{8,})")
_PARTIAL = re.compile(r"\.v\d{8,}\.partial")


class Store:
    """Safe for one writer and any number of readers, in any processes of one host or shared disk.

    Args:
        keep: how many versions stay; the newest always does.
    """

    def __init__(self, directory: Path, *, keep: int = KEEP) -> None:
        if keep < 1:
            raise ValueError(f"keep: expected 1 or more versions, got {keep}")
        self.directory = directory
        self._keep = keep

    def list(self) -> Sequence[int]:
        """Complete versions, oldest first."""
        if not self.directory.is_dir():
            return []
        names = (_NAME.fullmatch(entry.name) for entry in self.directory.iterdir())
        return sorted(int(name[1]) for name in names if name is not None)

    def path_of(self, version: int) -> Path:
        """Raises FileNotFoundError, naming what is there."""
        path = self._path(version)
        if not path.is_dir():
            raise FileNotFoundError(
                f"version {version} is not in {self.directory}, expected one of {self.list()}"
            )
        return path

    def manifest_of(self, version: int) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.path_of(version) / MANIFEST).read_text())
        return content

    @contextmanager
    def begin(self, version: int, manifest: dict[str, Any]) -> Iterator[Path]:
        """A directory to write the checkpoint into; it becomes the version when the block ends well.

        Args:
            manifest: JSON; what `manifest_of` gives back.

        Raises:
            FileExistsError: the version is complete already.
        """
        final = self._path(version)
        if final.exists():
            raise FileExistsError(f"version {version} is in {self.directory} already")
        aside = self.directory / f".{final.name}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            yield aside
            (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
            _sync_tree(aside)
            aside.rename(final)
            _sync(self.directory)
        except BaseException:  # also of the caller's block: a half written version is none
            shutil.rmtree(aside, ignore_errors=True)
            raise
        self.retain()

    @contextmanager
    def reading(self, version: int) -> Iterator[Path]:
        """The directory of a version, kept for as long as the block lasts."""
        path = self.path_of(version)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield self.path_of(version)  # it may have been removed before the lock was ours
        finally:
            os.close(descriptor)

    def retain(self) -> Sequence[int]:
        """Remove all but the newest `keep`, and what crashed writers left; returns what was removed."""
        self._remove_partial(self.list())
        return [version for version in self.list()[: -self._keep] if self._remove(version)]

    def _remove(self, version: int) -> bool:
        path = self._path(version)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            aside = self.directory / f".{path.name}.partial"
            path.rename(aside)  # a half removed version is never listed
            shutil.rmtree(aside)
        except BlockingIOError:
            return False  # somebody reads it; the next retention takes it
        finally:
            os.close(descriptor)
        return True

    def _remove_partial(self, complete: Sequence[int]) -> None:
        """One writer: after its rename whatever is partial is a crash's, not a colleague's."""
        for entry in self.directory.iterdir() if complete else ():
            if _PARTIAL.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)

    def _path(self, version: int) -> Path:
        return self.directory / f"v{version:08d}"


def _sync_tree(directory: Path) -> None:
    for parent, _, files in os.walk(directory, topdown=False):
        for name in files:
            _sync(Path(parent) / name)
        _sync(Path(parent))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
