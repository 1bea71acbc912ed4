"""Publishes an adapter: writes its two files aside, renames them, and has the controller load them if the
name is still at the version found. A controller that dies is succeeded by one that knows the same load.

Versions that others loaded under the name are never replaced: this trainer's name the fleet and its step.
"""

import json
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from deployments.calls.rpc import CallHandle, retried, run_sync
from deployments.protocol.adapters import LOAD_TIMEOUT_S, AdapterStatus, LoadRequest
from deployments.protocol.adapters import Adapter as LiveAdapter
from deployments.protocol.errors import Conflict
from deployments.protocol.responses import AdapterReport
from deployments.trainer.host_copies import in_host_memory
from deployments.weights.store.adapter_store import TENSORS, digest_of
from trainers.lora import LoraAdapter

CALL_TIMEOUT_S = 60.0
FLEET, STEP, LABELS = "fleet_id", "trainer_step", "trainer_labels"  # metadata of the safetensors file


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveVersion:
    version: int
    path: Path
    step: int | None  # the trainer's step; None: others loaded the version
    labels: Sequence[str]  # of its newest steps


class AdapterPublisher:
    """`directory` holds the files until the fleet has its copy; emptied first."""

    def __init__(
        self,
        name: str,
        controller: CallHandle,
        directory: Path,
        *,
        fleet_id: str,
        dtype: torch.dtype | None,
    ) -> None:
        self._name = name
        self._controller = controller
        self._directory = directory
        self._fleet_id = fleet_id
        self._dtype = dtype
        shutil.rmtree(directory, ignore_errors=True)

    def newest(self) -> LiveVersion | None:
        found = [each for each in self._adapters() if each.name == self._name and each.state == "live"]
        if not found:
            return None
        newest = max(found, key=lambda each: each.version)
        step, labels = _origin(Path(newest.path) / TENSORS, self._fleet_id)
        return LiveVersion(version=newest.version, path=Path(newest.path), step=step, labels=labels)

    def publish(
        self,
        adapter: LoraAdapter,
        *,
        step: int,
        labels: Sequence[str],
        base_version: int,
        label: str | None,
    ) -> AdapterReport:
        """Make the adapter the next version of its name, on all replicas or on none.

        Raises:
            InvalidRequest: the replicas rejected it.
            Conflict: others loaded the newest version or are loading one, or the files cannot be written.
            FleetUnavailable: too few replicas serve, or the controller does not answer.
        """
        began = time.monotonic()
        metadata = {FLEET: self._fleet_id, STEP: str(step), LABELS: json.dumps(labels)}
        files = adapter.files(dtype=self._dtype, metadata=metadata)
        contents = {name: memoryview(in_host_memory(each).numpy()) for name, each in files.items()}
        directory = self._directory / f"step-{step:06d}-{uuid.uuid4().hex[:8]}"
        try:
            with ThreadPoolExecutor(max_workers=1) as beside:
                hashing = beside.submit(digest_of, contents)
                self._write(directory, contents)
                digest = hashing.result()
            written = time.monotonic()
            version = self._load(directory, digest)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return AdapterReport(
            name=self._name,
            version=version,
            label=label,
            step=step,
            base_version=base_version,
            digest=digest,
            size_bytes=files[TENSORS].numel(),
            write_s=written - began,
            duration_s=time.monotonic() - began,
        )

    def _write(self, final: Path, files: Mapping[str, memoryview]) -> None:
        """Its content never changes, because the fleet's durable copy may be a hard link."""
        partial = final.with_name(f".{final.name}.partial")
        try:
            partial.mkdir(parents=True)
            for name, content in files.items():
                (partial / name).write_bytes(content)
            partial.rename(final)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)  # it may be what fills the disk
            raise Conflict(f"the adapter {self._name!r} is not published: {error}") from error

    def _load(self, directory: Path, digest: str) -> int:
        load = LoadRequest(
            name=self._name,
            path=str(directory),
            in_place=True,
            after=self._own_version(),
            load_id=uuid.uuid4().hex,
            digest=digest,
        )
        live: LiveAdapter = run_sync(retried(self._controller, "load_adapter", load, limit_s=LOAD_TIMEOUT_S))
        return live.version

    def _own_version(self) -> int:
        newest = self.newest()
        if newest is None:
            return 0
        if newest.step is None:
            raise Conflict(
                f"{self._name}@{newest.version} was not published by this fleet's trainer: unload it, or "
                "choose another 'trainer.lora.name'",
                {"lora_name": self._name, "version": newest.version},
            )
        return newest.version

    def _adapters(self) -> Sequence[AdapterStatus]:
        return run_sync(retried(self._controller, "adapters", limit_s=CALL_TIMEOUT_S))


def _origin(file: Path, fleet_id: str) -> tuple[int | None, Sequence[str]]:
    """The trainer's step and labels; None: others loaded it."""
    try:
        with safe_open(file, framework="pt") as tensors:
            metadata = tensors.metadata() or {}
    except (OSError, SafetensorError):  # being removed, because it was unloaded
        return None, ()
    step = metadata.get(STEP, "")
    is_own = step.isdecimal() and metadata.get(FLEET) == fleet_id
    return (int(step), json.loads(metadata.get(LABELS, "[]"))) if is_own else (None, ())
