"""Writes committed versions to the store in a thread of its own, off the critical path.

One is being written and one may wait: a newer one takes the place of the one that waits, so that a
slow disk costs versions and never memory or time between steps.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from deployments.logs import serve_logger
from deployments.weights.store.versions import Store

STATE_FILE = "trainer_state.rank{rank}.pt"
logger = serve_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedVersion:
    """Attributes:
    weights: by checkpoint name, copies that nobody changes.
    trainer_step: optimizer steps that made it.
    """

    version: int
    label: str | None
    weights: dict[str, torch.Tensor]
    trainer_step: int


class VersionWriter:
    """Args:
    write_files: puts config and tokenizer files beside the weights.
    stored: told of every version that is complete on the disk.
    """

    def __init__(
        self,
        store: Store,
        *,
        write_files: Callable[[Path], None],
        stored: Callable[[int, str, str | None], None],
    ) -> None:
        self._store = store
        self._write_files = write_files
        self._stored = stored
        self._changed = threading.Condition()
        self._waiting: CommittedVersion | None = None
        self._writing = False
        self._thread: threading.Thread | None = None
        self.newest: int | None = None
        self.problem: str | None = None  # why the last version is not in the store

    def put(self, version: CommittedVersion) -> None:
        """Returns at once."""
        with self._changed:
            self._waiting = version
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="version-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Until everything that was put is written; false if it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and not self._writing, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None)
                version, self._waiting = self._waiting, None
                self._writing = True
            assert version is not None
            try:
                path = self._write(version)
                self._stored(version.version, path, version.label)
                self.newest, self.problem = version.version, None
            except Exception as error:  # a full disk must not end training; status tells, the next one tries
                self.problem = f"version {version.version} is not in the store: {error}"
                logger.exception("version %d could not be stored", version.version)
            del version
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _write(self, version: CommittedVersion) -> str:
        try:
            with self._store.begin(version.version, manifest_of(version)) as directory:
                self._write_files(directory)
                save_file(version.weights, directory / "model.safetensors", metadata={"format": "pt"})
        except FileExistsError:
            logger.warning("version %d is in the store already", version.version)
        return str(self._store.path_of(version.version))


def manifest_of(version: CommittedVersion) -> dict[str, Any]:
    return {
        "version": version.version,
        "label": version.label,
        "trainer_step": version.trainer_step,
        "tensors": {
            name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
            for name, tensor in version.weights.items()
        },
    }
