"""The last committed versions on disk, as ordinary Hugging Face checkpoint directories.

    v00000012/          config.json, *.safetensors, tokenizer files, manifest.json
    v00000012/drafter/  *.safetensors of its drafter, if one was published
    .v00000013.a1b2c3d4.partial/  being written; renamed when everything is on the disk
    fleet.json, adapters/, trainer/  see `owner`, `adapter_store`, `deployments.trainer.spec`

A writer believed lost may write beside its replacement; the first to complete counts. A complete version
removes partial ones up to its number. The controller removes old versions, or one replica per host and
the trainer if hosts share no store; readers lock them.
"""

import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError

from deployments.host.durable_files import locked, replacing
from deployments.host.logs import serve_logger
from deployments.weights.store.owner import check_owner

MANIFEST = "manifest.json"
DRAFTER = "drafter."  # begins the names of tensors of a drafter with a checkpoint of its own
DRAFTER_DIRECTORY = "drafter"  # a version's directory with the drafter's checkpoint, unprefixed

logger = serve_logger()
_MTP = re.compile(r"(?:model\.|language_model\.)*(?:mtp[._]|layers\.(\d+)\.)")
_NAME = re.compile(r"v(\d{8,})")
_PARTIAL = re.compile(r"\.v(\d{8,})(?:\.[0-9a-f]{8})?\.partial")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    dtype: str  # torch's name, without "torch."
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionManifest:
    version: int
    label: str | None = None
    fleet_id: str | None = None
    digest: str | None = None  # as committed
    trainer_step: int | None = None  # optimizer steps so far; None: unknown
    trainer_labels: tuple[str, ...] | None = None  # None: unknown
    drafter: int | None = None  # its drafter's version; None: none was published
    tensors: Mapping[str, StoredTensor]

    @property
    def step_labels(self) -> tuple[str, ...]:
        """A replica that stored the version knows the last one only."""
        labels = self.trainer_labels or ()
        return labels if self.label is None or self.label in labels else (*labels, self.label)

    @property
    def owner(self) -> str:
        return "no fleet" if self.fleet_id is None else f"fleet {self.fleet_id}"

    def encode(self) -> str:
        known: dict[str, Any] = _MANIFESTS.dump_python(self, mode="json", exclude_none=True)
        return json.dumps(known, indent=1)

    @classmethod
    def decode(cls, text: str | bytes) -> "VersionManifest":
        """Raises ValueError, naming the first wrong field."""
        try:
            return _MANIFESTS.validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or "text"
            raise ValueError(
                f"not a manifest: {field}: {first['msg']}, got {first['input']!r:.80}"
            ) from error


_MANIFESTS = TypeAdapter(VersionManifest)


class _Owned(msgspec.Struct):
    """Of a manifest of 20 thousand tensors, without the 30 ms of the interpreter lock for the rest."""

    fleet_id: str | None = None


_OWNED = msgspec.json.Decoder(_Owned)


def mtp_names(names: Iterable[str], depth: int) -> frozenset[str]:
    """The multi-token prediction of a checkpoint whose policy has `depth` layers: transformers' models leave
    it out, and so do their publishers."""
    found = ((name, _MTP.match(name)) for name in names)
    return frozenset(name for name, match in found if match and int(match[1] or depth) >= depth)


class DirectoryLock:
    """Keeps a stored version from being removed. Raises ValueError if it is being or was removed."""

    def __init__(self, directory: Path) -> None:
        self._descriptor: int | None = os.open(_lockable(directory), os.O_RDONLY | os.O_CLOEXEC)
        held = locked(self._descriptor, shared=True)
        # Without locks nothing is removed.
        if held is not None and not (held and directory.exists()):
            self.close()
            raise ValueError(f"{directory} is being removed from the store")

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:  # a read that finished after its caller gave up
        if getattr(self, "_descriptor", None) is not None:
            self.close()


class Store:
    """Safe for any number of writers and readers, on one host or a shared disk."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def list(self) -> Sequence[int]:
        if not self.directory.is_dir():
            return []
        names = (_NAME.fullmatch(entry.name) for entry in self.directory.iterdir())
        return sorted(int(name[1]) for name in names if name is not None)

    def path_of(self, version: int) -> Path:
        """Raises FileNotFoundError, naming the versions in the store."""
        path = self.path(version)
        if not path.is_dir():
            raise FileNotFoundError(
                f"version {version} is not in {self.directory}, expected one of {self.list()}"
            )
        return path

    def manifest_of(self, version: int) -> VersionManifest:
        """Raises FileNotFoundError, or ValueError if it is damaged."""
        file = self.path_of(version) / MANIFEST
        try:
            return VersionManifest.decode(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    @contextmanager
    def writing(self, version: int, fleet_id: str | None = None) -> Iterator[Path]:
        """A directory that becomes the version when the block, which writes the manifest, succeeds; otherwise
        it is removed. Raises FileExistsError (the version is complete) or OSError (unwritable, another
        fleet's, or a newer version completed first)."""
        if fleet_id is not None:
            check_owner(self.directory, fleet_id)
        final = self.path(version)
        if final.exists():
            raise FileExistsError(f"version {version} is in {self.directory} already")
        partial = self.directory / f".{final.name}.{uuid.uuid4().hex[:8]}.partial"
        new = partial.with_suffix(".new")
        new.mkdir(parents=True)
        lock = os.open(new, os.O_RDONLY)
        try:
            locked(lock, shared=True)
            new.rename(partial)  # by that name others remove it if it is not locked
            with replacing(final, partial):
                yield partial
        except OSError as error:
            if final.exists():  # its writer removed the partial directory
                raise FileExistsError(f"version {version} is in {self.directory} already") from error
            raise
        finally:
            os.close(lock)
        for entry in self.directory.iterdir():
            name = _PARTIAL.fullmatch(entry.name)
            if name is not None and int(name[1]) <= version:  # a crash left it, or it is too late
                shutil.rmtree(entry, ignore_errors=True)

    def being_written(self) -> Sequence[str]:
        """Versions and trainer checkpoints that live processes write, with sizes; none without file locks."""
        found = []
        for partial, is_written in self._partials():
            if is_written:
                size = sum(map(_size, partial.glob("*")))
                found.append(f"{partial.name.split('.')[1]} ({size / 1e9:.1f} GB)")
        return found

    def remove_left(self) -> None:
        """What killed processes have not completed. Only for a store of this host's own: others do not see
        its locks."""
        for partial, is_written in self._partials():
            if is_written is False and _PARTIAL.fullmatch(partial.name):
                shutil.rmtree(partial, ignore_errors=True)

    def _partials(self) -> Iterator[tuple[Path, bool | None]]:
        """Whether a live process writes it; None: a file system without locks."""
        for partial in (
            *self.directory.glob(".v*.partial"),
            *self.directory.glob("trainer/*/.step-*.partial"),
        ):
            try:
                descriptor = os.open(partial, os.O_RDONLY)
            except FileNotFoundError:  # it is complete by now
                continue
            try:
                free = locked(descriptor)
                yield partial, None if free is None else not free
            finally:
                os.close(descriptor)

    @contextmanager
    def reading(self, version: int) -> Iterator[Path]:
        """Prevents removal inside the block. Raises FileNotFoundError."""
        try:
            lock = DirectoryLock(self.path_of(version))
        except ValueError as error:
            raise FileNotFoundError(str(error)) from error
        try:
            yield self.path(version)
        finally:
            lock.close()

    def remove(self, version: int) -> bool:
        """Remove a version; False: it is being read. Raises OSError if it is absent or cannot be removed."""
        path = self.path(version)
        file = _lockable(path)
        descriptor = os.open(file, os.O_RDONLY if file == path else os.O_RDWR)  # NFS locks for writing
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            partial = self.directory / f".{path.name}.partial"
            path.rename(partial)  # a version that is half removed is never listed
            shutil.rmtree(partial, ignore_errors=True)  # the next writer removes what is left
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    def remove_old(self, fleet_id: str, keep: int) -> None:
        """All but the last versions of a fleet: an operator may have copied others here."""
        own = []
        for version in self.list():
            with suppress(OSError, ValueError):
                if _OWNED.decode((self.path(version) / MANIFEST).read_bytes()).fleet_id == fleet_id:
                    own.append(version)
        for version in own[:-keep]:
            try:
                self.remove(version)  # one that is being read stays for now
            except FileNotFoundError:
                pass  # another process of this host was first
            except OSError as error:  # the next version is written all the same
                logger.warning("old versions stay in the store: %s", error)

    def path(self, version: int) -> Path:
        return self.directory / f"v{version:08d}"


def _lockable(directory: Path) -> Path:
    """The file to lock for a version's directory: all hosts of an NFS see locks of files, one host those of
    directories. Not its manifest, which the trainer may replace."""
    files = directory / MANIFEST, directory / "model.safetensors"
    return files[1] if all(each.is_file() for each in files) else directory  # not ours: opening may block


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # its directory got its name meanwhile
        return 0
