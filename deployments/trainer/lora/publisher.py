"""An adapter on its way into the fleet: its files, and the controller's load of the next version of its name.

    write the files aside, then rename  ──► load_adapter, if the name is at the version that was found
    save the trainer's state                beside that, and before the load
    send them from memory to the replicas   beside that; without them replicas read the fleet's copy
    the controller dies meanwhile       ──► its successor's catalog says what became of the load

A version is this trainer's if its files say so: they name the fleet and the trainer's step. What somebody
else has loaded under the name is never replaced.
"""

import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from deployments.calls.rpc import CallHandle, bounded, is_lost, retried, run_sync
from deployments.host.logs import serve_logger
from deployments.protocol.adapters import Adapter as LoadedAdapter
from deployments.protocol.adapters import AdapterStatus
from deployments.protocol.errors import Conflict, FleetUnavailable
from deployments.protocol.responses import AdapterReport
from deployments.trainer.lora.host_copies import in_host_memory
from deployments.trainer.lora.sender import AdapterSender
from deployments.weights.store.adapter_store import TENSORS, digest_of
from trainers.lora import Adapter

CALL_TIMEOUT_S = 60.0  # of a question
LOAD_TIMEOUT_S = 300.0  # the fleet has deadlines of its own; this one ends a call to a controller that hangs
ATTEMPTS = 3
FLEET, STEP = "fleet_id", "trainer_step"  # in the metadata of the safetensors file
logger = serve_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveVersion:
    """The newest version of a name that requests can name."""

    version: int
    path: Path
    digest: str
    step: int | None  # of this fleet's trainer; None: it is somebody else's


class AdapterPublisher:
    """Publishes the adapter of one name.

    Args:
        sender: None: replicas read the fleet's copy.
        directory: where the files are until the fleet has its copy; emptied first, nobody else uses it.
    """

    def __init__(
        self,
        name: str,
        controller: CallHandle,
        directory: Path,
        *,
        fleet_id: str,
        dtype: torch.dtype | None,
        sender: AdapterSender | None = None,
    ) -> None:
        self._name = name
        self._controller = controller
        self._directory = directory
        self._fleet_id = fleet_id
        self._dtype = dtype
        self._sender = sender
        shutil.rmtree(directory, ignore_errors=True)

    def newest(self) -> LiveVersion | None:
        """The newest live version of the name; None: there is none.

        Raises:
            FleetUnavailable: the controller does not answer.
        """
        found = [each for each in self._adapters() if each.name == self._name and each.state == "live"]
        if not found:
            return None
        newest = max(found, key=lambda each: each.version)
        return LiveVersion(
            version=newest.version,
            path=Path(newest.path),
            digest=newest.digest,
            step=_trainer_step(Path(newest.path) / TENSORS, self._fleet_id),
        )

    def publish(
        self,
        adapter: Adapter,
        *,
        step: int,
        base_version: int,
        label: str | None,
        before_load: Callable[[], None] = lambda: None,
    ) -> AdapterReport:
        """Make the adapter the next version of its name, on all replicas or on none.

        Args:
            step: optimizer steps that it has had.
            base_version: of the weights that it was trained on.
            before_load: called in another thread; ends before the fleet is asked to load it.

        Raises:
            InvalidRequest: the replicas rejected it.
            Conflict: the newest version is somebody else's, the name is being loaded, some replicas rejected
                it, or the files cannot be written. The fleet is as it was.
            FleetUnavailable: too few replicas serve, or the controller does not answer.
        """
        began = time.monotonic()
        files = adapter_files(adapter, dtype=self._dtype, fleet_id=self._fleet_id, step=step)
        directory = self._directory / f"step-{step:06d}-{uuid.uuid4().hex[:8]}"
        sending, load_id = threading.Event(), uuid.uuid4().hex

        def written_and_loaded() -> tuple[float, int, str]:
            saving = beside.submit(before_load)  # it is several times as large as the files
            contents = {name: memoryview(in_host_memory(each).numpy()) for name, each in files.items()}
            hashing = beside.submit(digest_of, contents)
            self._write(directory, contents)
            digest = hashing.result()
            written = time.monotonic()
            saving.result()
            sending.wait()  # replicas carry out instructions in their order, and are to receive it first
            version = self._loaded(directory, digest, "" if self._sender is None else load_id)
            return written, version, digest

        transfer_s = None
        try:
            with ThreadPoolExecutor(max_workers=3) as beside:
                loading = beside.submit(written_and_loaded)
                try:
                    if self._sender is not None:
                        transfer_s = self._sender.send(files, load_id, sending.set)
                finally:
                    sending.set()
                written, version, digest = loading.result()
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
            transfer_s=transfer_s,
            duration_s=time.monotonic() - began,
        )

    def _write(self, final: Path, files: Mapping[str, memoryview]) -> None:
        """A directory that is complete when it has its name, and does not change any more: the fleet's copy
        may be the same files. Not durable: that copy is, and the trainer's state."""
        partial = final.with_name(f".{final.name}.partial")
        try:
            partial.mkdir(parents=True)
            for name, content in files.items():
                (partial / name).write_bytes(content)
            partial.rename(final)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)  # it may be what fills the disk
            raise Conflict(f"the adapter {self._name!r} is not published: {error}") from error

    def _loaded(self, directory: Path, digest: str, load_id: str) -> int:
        """The version that the directory has become."""
        for _ in range(ATTEMPTS):
            before = self._own_version()
            try:
                return run_sync(self._load(str(directory), before, load_id, digest)).version
            except Exception as error:
                if not is_lost(error):
                    raise
            found = self.newest()
            if found is not None and found.version > before and found.digest == digest:
                return found.version
            logger.warning("the controller was lost, and the load of %r with it: again", self._name)
        raise FleetUnavailable(
            f"the adapter {self._name!r} is not published: the controller was lost {ATTEMPTS} times"
        )

    async def _load(self, directory: str, before: int, load_id: str, digest: str) -> LoadedAdapter:
        load = self._controller.load_adapter.remote(
            self._name, directory, True, False, before, load_id, digest
        )
        return await bounded(load, "load_adapter", LOAD_TIMEOUT_S)

    def _own_version(self) -> int:
        """The newest live version, which is this trainer's; 0: there is none."""
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
        adapters = self._controller.adapters
        return run_sync(retried(lambda: adapters.remote(), "adapters", limit_s=CALL_TIMEOUT_S))


def adapter_files(
    adapter: Adapter, *, dtype: torch.dtype | None, fleet_id: str, step: int
) -> dict[str, torch.Tensor]:
    """The bytes of what is published of an adapter, by the names of files: the same on every rank."""
    return adapter.files(dtype=dtype, metadata={FLEET: fleet_id, STEP: str(step)})


def _trainer_step(file: Path, fleet_id: str) -> int | None:
    """The step in a file that this fleet's trainer has written; None: nobody says so."""
    try:
        with safe_open(file, framework="pt") as tensors:
            metadata = tensors.metadata() or {}
    except (OSError, SafetensorError):  # it is being removed: somebody has unloaded it
        return None
    step = metadata.get(STEP, "")
    return int(step) if step.isdecimal() and metadata.get(FLEET) == fleet_id else None
