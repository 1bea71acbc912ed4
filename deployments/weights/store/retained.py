"""What a replica keeps of a round for the store: the tensors as they came, in host memory.

Only for a publisher that writes no checkpoint itself. One worker of a replica keeps them (every worker
receives all). At most one version is kept beside the one that is being written; what arrives counts
as kept only once it was committed.

On the device's side this costs a copy to the host for each tensor while staging; on a CPU it is a
reference to memory that came in anyway.
"""

import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deployments.weights.store.safetensors_file import write_safetensors
from deployments.weights.store.versions import MANIFEST, Store
from deployments.weights.wire.digest import digests

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json", MANIFEST)


@dataclass(slots=True, kw_only=True)
class Kept:
    version: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    digests: dict[str, int] = field(default_factory=dict)  # as they were found on arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    kept: Kept
    label: str | None
    store: Store


class Keeper:
    """Called on the engine's thread, but for `add` and `found`, which run on the staging thread.

    Args:
        model: the directory or hub id that the engine was started from; its other files are copied.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._arriving: Kept | None = None
        self._kept: Kept | None = None
        self._changing = threading.Lock()
        self._waiting: Job | None = None
        self._thread: threading.Thread | None = None
        self._ended: dict[str, Any] | None = None

    def begin(self) -> None:
        self._arriving = None

    def expect(self, version: int) -> None:
        """Keep what arrives from now on."""
        self._arriving = Kept(version=version)

    @property
    def expecting(self) -> bool:
        return self._arriving is not None

    def add(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        arriving = self._arriving
        if arriving is not None:
            arriving.tensors.update((name, tensor.cpu()) for name, tensor in tensors)

    def found(self, digests: dict[str, int]) -> None:
        """The digests of what has arrived, by name."""
        arriving = self._arriving
        if arriving is not None:
            arriving.digests = digests

    def commit(self) -> None:
        """What arrived is a version of the fleet now. An older one is not needed any more, also when this
        one is not kept: then its publisher writes it."""
        self._kept, self._arriving = self._arriving, None

    def forget(self, version: int) -> None:
        if self._kept is not None and self._kept.version <= version:
            self._kept = None

    def write(self, version: int, label: str | None, directory: str, keep: int) -> None:
        """Have a thread write a kept version to the store; `state` tells how it ended.

        One is being written and one may wait: a newer one takes the place of the one that waits.

        Raises:
            ValueError: this version is not kept here.
        """
        kept = self._kept
        if kept is None or kept.version != version:
            held = None if kept is None else kept.version
            raise ValueError(f"version {version} is to be stored, and what is kept here is {held}")
        with self._changing:
            self._waiting = Job(kept=kept, label=label, store=Store(Path(directory), keep=keep))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="version-writer", daemon=True)
                self._thread.start()

    def state(self) -> dict[str, Any] | None:
        """How the last writing ended: {"version", "label", "path", "problem"}."""
        return self._ended

    def _run(self) -> None:
        while True:
            with self._changing:
                job, self._waiting = self._waiting, None
                if job is None:
                    self._thread = None
                    return
            self._ended = self._result(job)
            del job  # its tensors, before the next one's are read

    def _result(self, job: Job) -> dict[str, Any]:
        path = problem = ""
        try:
            path = write_version(job, self._model)
        except Exception as error:  # a thread's last word: the fleet is told, and another replica tries
            problem = f"{type(error).__name__}: {error}"
        return {"version": job.kept.version, "label": job.label, "path": path, "problem": problem}


def write_version(job: Job, model: str) -> str:
    """The directory that it was written to.

    Raises:
        ValueError: the kept bytes are no longer those that arrived.
    """
    kept, store = job.kept, job.store
    found = dict(zip(kept.tensors, digests(list(kept.tensors.values())), strict=True))
    torn = [name for name, digest in found.items() if kept.digests.get(name) != digest]
    if torn:
        raise ValueError(f"{len(torn)} kept tensors changed since they arrived, first {torn[0]!r}")
    manifest = {
        "version": kept.version,
        "label": job.label,
        "tensors": {
            name: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "digest": f"{found[name]:016x}",
            }
            for name, tensor in kept.tensors.items()
        },
    }
    try:
        with store.begin(kept.version, manifest) as directory:
            copy_model_files(model, directory)
            write_safetensors(kept.tensors, directory / "model.safetensors")
    except FileExistsError:
        pass  # another replica wrote it and was lost before it could say so
    return str(store.path_of(kept.version))


def copy_model_files(model: str, directory: Path) -> None:
    """Everything of a checkpoint that is no weight: config, tokenizer, chat template.

    Args:
        model: a directory, or a hub id whose files are in the hub's cache.
    """
    source = Path(model)
    if not source.is_dir():
        from huggingface_hub import snapshot_download

        source = Path(snapshot_download(model, local_files_only=True))
    for file in source.iterdir():
        if file.is_file() and not any(file.match(pattern) for pattern in WEIGHT_FILES):
            shutil.copyfile(file, directory / file.name)
