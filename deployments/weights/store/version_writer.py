"""Writes committed versions to the store on a background thread. One is being written and one may wait,
replaced by a newer one: a slow disk costs versions, not memory or time between steps. The trainer writes what
it published; for external publishers a replica writes the tensors it retained (`RetainedVersions`)."""

import json
import shutil
import struct
import threading
from collections.abc import Callable, Collection, Mapping, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import _TYPES

from deployments.host.durable_files import flushing, replacing
from deployments.host.logs import serve_logger
from deployments.protocol.poll import StoreResult, WriteVersion
from deployments.weights.store.versions import (
    DRAFTER,
    DRAFTER_DIRECTORY,
    MANIFEST,
    Store,
    StoredTensor,
    VersionManifest,
)
from deployments.weights.wire.chunk_layout import ReceivedChunk
from deployments.weights.wire.digest import digest
from deployments.weights.wire.digest_definition import version_digest

ALIGNMENT = 8
NAMES = {dtype: name for name, dtype in _TYPES.items()}
WRITE_BYTES = 4 << 20  # some milliseconds without the interpreter lock
REPORT_S = 5.0
logger = serve_logger()
_Retained = tuple[int, dict[str, torch.Tensor]]  # version, tensors on the CPU


def write_safetensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write CPU tensors of any shape to one safetensors file. Raises ValueError for other dtypes.
    `safetensors.torch.save_file` copies all tensors and holds the interpreter lock, which would stall an
    engine's or trainer's thread."""
    # Widest dtypes first, which aligns every tensor to its item size; then by name: a replica may read two
    # halves of the file from different writers.
    ordered = sorted(tensors.items(), key=lambda pair: (-pair[1].itemsize, pair[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in NAMES:
            raise ValueError(f"{name!r} has dtype {tensor.dtype}, which safetensors cannot hold")
        begin, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in ordered:
            data = memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
            for start in range(0, len(data), WRITE_BYTES):
                file.write(data[start : start + WRITE_BYTES])


def read_tensors(directory: Path, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Memory-mapped tensors of a checkpoint directory. Raises ValueError if one is absent."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")) if names else ():
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.offset_keys() if name in names}
    absent = sorted(set(names) - found.keys())
    if absent:
        raise ValueError(f"{directory} must hold {len(absent)} more tensors, first {absent[:5]}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedVersion:
    """A version with its tensors, which no longer change. `drafter`: version and tensors of the last drafter,
    kept if this version has none and the store no newer one. `mtp`: names of the multi-token prediction in
    `base`, the served checkpoint, if nothing else drafts."""

    version: int
    label: str | None
    tensors: Mapping[str, torch.Tensor]  # keys: checkpoint names; CPU tensors
    fleet_id: str | None = None
    digest: str | None = None  # as committed; None: unknown
    trainer_step: int | None = None  # optimizer steps that made it
    trainer_labels: tuple[str, ...] | None = None  # the newest steps'
    drafter: _Retained | None = None
    mtp: Set[str] = frozenset()
    base: Path | None = None


class VersionWriter:
    """Writes one version at a time, in the background. `write_files` writes the config and tokenizer files
    beside the weights. `report` is called on the thread with every result; its exceptions are logged."""

    def __init__(
        self,
        *,
        write_files: Callable[[Path], None],
        report: Callable[[StoreResult], object] = lambda result: None,
    ) -> None:
        self._write_files = write_files
        self._report = report
        self._changed = threading.Condition()
        self._waiting: tuple[CommittedVersion, Store] | None = None
        self._drafter: _Retained | None = None  # the newest one, until it is in the store
        self._writing = False
        self._reports = 0
        self._thread: threading.Thread | None = None
        self.result: StoreResult | None = None  # the last write's
        self.newest: int | None = None

    def put(self, version: CommittedVersion, store: Store) -> None:
        with self._changed:
            if self.result is not None and self.result.version == version.version:
                self.result = None
            if drafter := _drafter_of(version.tensors, version.mtp):
                self._drafter = version.version, drafter
            self._drafter = version.drafter or self._drafter
            self._waiting = replace(version, drafter=self._drafter), store
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="version-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait for all writes, and briefly for their reports; False after `timeout_s`."""
        with self._changed:
            written = self._changed.wait_for(lambda: self._waiting is None and not self._writing, timeout_s)
            if written:  # a stopping trainer's controller may be gone
                self._changed.wait_for(lambda: not self._reports, min(timeout_s, REPORT_S))
            return written

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None)
                assert self._waiting is not None
                version, store = self._waiting
                self._waiting, self._writing = None, True
            drafter = version.drafter
            result = self._write(version, store)
            del version  # frees its tensors before the next one
            with self._changed:
                if self._drafter is drafter and not result.problem:
                    self._drafter = None
                self.result = result
                self._writing = False
                self._reports += 1
                self._changed.notify_all()
            # On its own thread: a report that is never answered must not delay the next version.
            threading.Thread(target=self._tell, args=(result,), daemon=True).start()

    def _tell(self, result: StoreResult) -> None:
        try:
            self._report(result)
        except Exception as error:  # the controller finds the version in the store
            what = "not stored" if result.problem else "stored"
            logger.warning("failed to report that version %d was %s: %s", result.version, what, error)
        with self._changed:
            self._reports -= 1
            self._changed.notify_all()

    def _write(self, version: CommittedVersion, store: Store) -> StoreResult:
        result = StoreResult(version=version.version, label=version.label, path="", problem="")
        try:
            path = write_version(version, store, self._write_files)
        except Exception as error:  # the result reports it
            result = replace(result, problem=f"{type(error).__name__}: {error}")
            expected = isinstance(error, OSError | ValueError)
            logger.error(
                "version %d could not be stored: %s", version.version, result.problem, exc_info=not expected
            )
            return result
        self.newest = version.version
        return replace(result, path=str(path))


def write_version(version: CommittedVersion, store: Store, write_files: Callable[[Path], None]) -> Path:
    """Write a checkpoint directory with its manifest. A version completed by a crashed writer stays. Raises
    ValueError if the tensors differ from what was committed or from what is stored."""
    kept = None if _drafter_of(version.tensors, version.mtp) else _with_drafter(version, store)
    try:
        with ExitStack() as stack:
            source = None if kept is None else stack.enter_context(store.reading(kept.version))
            tensors = _whole(version, source)
            directory = stack.enter_context(store.writing(version.version, version.fleet_id))
            stack.enter_context(flushing(directory))
            manifest = _manifest(version, kept, tensors)
            write_files(directory)
            drafter = _drafter_of(tensors)
            policy = {name: each for name, each in tensors.items() if name not in drafter}
            write_safetensors(policy, directory / "model.safetensors")
            if source is not None and (source / DRAFTER_DIRECTORY).is_dir():
                shutil.copytree(source / DRAFTER_DIRECTORY, directory / DRAFTER_DIRECTORY)
            elif drafter:
                (directory / DRAFTER_DIRECTORY).mkdir(exist_ok=True)
                named = {name.removeprefix(DRAFTER): each for name, each in drafter.items()}
                write_safetensors(named, directory / DRAFTER_DIRECTORY / "model.safetensors")
            (directory / MANIFEST).write_text(manifest.encode())
    except FileExistsError:
        stored, manifest = store.manifest_of(version.version), _manifest(version, kept, tensors)
        if stored.fleet_id != manifest.fleet_id or stored.tensors != manifest.tensors:
            raise ValueError(
                f"version {version.version} is in the store already, of {stored.owner} and with digest "
                f"{stored.digest}; this is of {manifest.owner} and has {manifest.digest}"
            ) from None
        if (
            stored.trainer_step is None and version.trainer_step is not None
        ):  # a replica of this host was first
            with replacing(store.path_of(version.version) / MANIFEST) as aside:
                aside.write_text(manifest.encode())
        logger.warning("version %d is in the store already", version.version)
    return store.path_of(version.version)


def _drafter_of(tensors: Mapping[str, torch.Tensor], mtp: Set[str] = frozenset()) -> dict[str, torch.Tensor]:
    return {name: each for name, each in tensors.items() if name.startswith(DRAFTER) or name in mtp}


def _whole(version: CommittedVersion, source: Path | None) -> dict[str, torch.Tensor]:
    """Adds the drafter of the version before, except what a drafter's directory holds. `source`: the stored
    version that has this one's drafter."""
    tensors = dict(version.tensors)
    if source is None and version.drafter is not None and not _drafter_of(tensors, version.mtp):
        tensors |= version.drafter[1]
    if absent := version.mtp - tensors.keys():
        assert version.base is not None
        tensors |= read_tensors(version.base if source is None else source, absent)
    return tensors


def _with_drafter(version: CommittedVersion, store: Store) -> VersionManifest | None:
    """The newest stored version before this one, if it has a newer drafter. A drafter in the served
    checkpoint is in every version."""
    came = -1 if version.drafter is None else version.drafter[0]
    for number in reversed([each for each in store.list() if each < version.version]):
        with suppress(OSError, ValueError):
            found = store.manifest_of(number)
            if found.fleet_id == version.fleet_id:
                newest = number if version.mtp else found.drafter
                return None if newest is None or newest <= came else found
    return None


def _manifest(
    version: CommittedVersion, kept: VersionManifest | None, tensors: Mapping[str, torch.Tensor]
) -> VersionManifest:
    """`kept`: the stored version that has this one's drafter. `tensors`: see `_whole`."""
    digests = {name: digest(tensor.contiguous()) for name, tensor in tensors.items()}
    combined = version_digest(list(version.tensors), [digests[name] for name in version.tensors])
    if version.digest not in (None, combined):
        raise ValueError(
            f"version {version.version} was committed with digest {version.digest}, and its tensors now have "
            f"{combined}"
        )
    drafter = None if version.drafter is None else version.drafter[0]
    if _drafter_of(version.tensors, version.mtp):
        drafter = version.version
    stored = {
        name: StoredTensor(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            digest=f"{digests[name]:016x}",
        )
        for name, tensor in tensors.items()
    }
    if kept is not None:
        drafter = kept.drafter
        stored |= {name: each for name, each in kept.tensors.items() if name.startswith(DRAFTER)}
    return VersionManifest(
        version=version.version,
        label=version.label,
        fleet_id=version.fleet_id,
        digest=combined,
        trainer_step=version.trainer_step,
        trainer_labels=version.trainer_labels,
        drafter=drafter,
        tensors=stored,
    )


class RetainedVersions:
    """Tensors of a round, in host memory until the store has them. One worker of a replica retains the
    arriving version, the newest committed one and the newest drafter: on a GPU one host copy per tensor, on a
    CPU a reference. `add` is called on the staging thread, the others on the engine's."""

    def __init__(self, mtp: Set[str] = frozenset(), base: Path | None = None) -> None:
        self._mtp, self._base = mtp, base  # see `CommittedVersion`
        self._arriving: _Retained | None = None
        self._committed: _Retained | None = None
        self._drafter: _Retained | None = None

    def begin(self, version: int | None) -> None:
        """Discard what is arriving; retain what follows as this version, unless None."""
        self._arriving = None if version is None else (version, {})

    def add(self, received: ReceivedChunk) -> None:
        arriving = self._arriving
        if arriving is not None:
            arriving[1].update((name, tensor.cpu()) for name, tensor in received.named())

    def commit(self) -> None:
        """What arrived replaces the retained version, even if it is not retained."""
        self._committed, self._arriving = self._arriving, None
        if self._committed is not None and (drafter := _drafter_of(self._committed[1], self._mtp)):
            self._drafter = self._committed[0], drafter

    def forget(self, version: int) -> None:
        """Free this version and older ones."""
        if self._committed is not None and self._committed[0] <= version:
            self._committed = None
        if self._drafter is not None and self._drafter[0] <= version:
            self._drafter = None

    def committed(self, wanted: WriteVersion) -> CommittedVersion:
        retained, tensors = self._committed or (None, {})
        if retained != wanted.version:
            raise ValueError(
                f"version {wanted.version} must be retained to be stored, the retained one is {retained}"
            )
        return CommittedVersion(
            version=wanted.version,
            label=wanted.label,
            fleet_id=wanted.fleet_id,
            digest=wanted.digest,
            tensors=tensors,
            drafter=self._drafter,
            mtp=self._mtp,
            base=self._base,
        )
