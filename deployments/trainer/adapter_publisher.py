"""Publishes an adapter: its two files go to the replicas' memory, and the controller loads the next version.

    the files are written aside, then renamed  ──► load_adapter, if the name is still at the version found
    beside it they go to the replicas          ──► a replica that received none reads the fleet's copy
    the controller dies meanwhile              ──► its successor is asked for the same load

Versions that others loaded under the name are never replaced: this trainer's name the fleet and its step.
"""

import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.distributed.weight_transfer import ParamMeta

from deployments.calls.rpc import CallHandle, retried, run_sync
from deployments.host.logs import serve_logger
from deployments.protocol.adapters import LOAD_TIMEOUT_S, AdapterStatus, LoadRequest
from deployments.protocol.adapters import Adapter as LiveAdapter
from deployments.protocol.errors import Conflict, SlipstreamError, TransferFailed
from deployments.protocol.publishing import RoundOptions
from deployments.protocol.responses import AdapterReport
from deployments.trainer.fleet_connection import FleetConnection, FleetWeightSyncClient
from deployments.trainer.host_copies import in_host_memory
from deployments.trainer.spec import PUBLISHER, TrainerSpec
from deployments.vllm_versions import Source
from deployments.weights.store.adapter_store import TENSORS, digest_of
from deployments.weights.transports.registry import TRANSPORTS, SameGpu
from trainers.lora import LoraAdapter

CALL_TIMEOUT_S = 60.0
ONE_CHUNK = 1 << 62  # a transfer is one payload on every transport
FLEET, STEP = "fleet_id", "trainer_step"  # metadata of the safetensors file
logger = serve_logger()


class FileSource(Source):
    def __init__(self) -> None:
        self._files: dict[str, torch.Tensor] = {}

    def take(self, files: Mapping[str, torch.Tensor]) -> bool:
        """Take the contents of files; whether their sizes differ from the previous ones."""
        before = self.specs()
        self._files = dict(files)
        return self.specs() != before

    def forget(self) -> None:
        self._files = {name: torch.empty_like(each, device="meta") for name, each in self._files.items()}

    def specs(self) -> list[ParamMeta]:
        return [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in self._files.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._files.items())


class AdapterSyncClient(FleetWeightSyncClient):
    """vLLM's weight-sync client for a transfer that is no round. `on_sending` is called when the replicas are
    about to receive."""

    load_id = ""
    on_sending: Callable[[], None] = staticmethod(lambda: None)

    def start_weight_update(self) -> None:
        run_sync(self._session.acquire())

    def update_weights(self, update_info: Any) -> None:
        self.on_sending()
        run_sync(self._session.send(update_info, self.load_id))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.release()


class AdapterSender:
    """Sends an adapter's files to the replicas. A failed transfer costs time only: replicas load the fleet's
    copy. `every_rank`: each rank reaches only the replicas on its own GPU, so all of them send."""

    def __init__(self, spec: TrainerSpec, rank: int, controller: CallHandle, *, every_rank: bool) -> None:
        self._spec = spec
        self._rank = rank
        self._every_rank = every_rank
        self._client = AdapterSyncClient(controller, PUBLISHER, RoundOptions())
        self._source = FileSource()
        self._connection = FleetConnection(
            spec, rank, self._client, self._source, chunk_bytes=ONE_CHUNK, takes_over=False
        )
        self._agreed = False  # true once this publish has called `agree`

    def send(
        self,
        files: Mapping[str, torch.Tensor],
        load_id: str = "",
        on_sending: Callable[[], None] = lambda: None,
    ) -> float | None:
        """Send an adapter's files (uint8 [size] by name, the same on every rank that sends); returns the
        seconds it took, None if it failed. Raises if every rank sends, and this one has a fault that the
        others do not know of."""
        began = time.perf_counter()
        self._client.load_id, self._client.on_sending = load_id, on_sending
        try:
            resized = self._source.take(files)
            self._agreed = True
            membership = self._connection.agree(reusable=not resized, together=self._every_rank)
            if membership is not None:
                self._connection.connect(membership)
            self._connection.send_weights()
        except Exception as error:  # any failure: replicas read the store instead
            self._connection.close()
            self._client.release()
            if self._every_rank and not isinstance(error, SlipstreamError | TransferFailed | ValueError):
                raise  # other ranks may wait for this one
            if self._rank == 0:
                logger.warning(
                    "replicas read the adapter from the store: its transfer over %r failed: %s",
                    self._spec.transport,
                    _last_line(error),
                )
            return None
        finally:
            self._source.forget()
        return time.perf_counter() - began

    def end(self) -> None:
        """On rank 0, after each publish: release the other ranks if nothing was sent."""
        if self._every_rank and not self._agreed:
            self._connection.call_off("it sends nothing")
        self._agreed = False


def adapter_sender(spec: TrainerSpec, rank: int, controller: CallHandle) -> AdapterSender | None:
    """None: this rank does not send, or replicas read every adapter from the store (vLLM's own engines send
    weights alone)."""
    every_rank = TRANSPORTS[spec.transport].same_gpu is SameGpu.POSSIBLE and spec.config.world_size > 1
    if spec.native or (rank != 0 and not every_rank):
        return None
    return AdapterSender(spec, rank, controller, every_rank=every_rank)


def _last_line(error: Exception) -> str:
    """Ray's messages begin with a trace."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveVersion:
    version: int
    path: Path
    step: int | None  # the trainer's step; None: others loaded the version


class AdapterPublisher:
    """Publishes the adapter of one name. `directory` holds the files until the fleet has its copy; emptied
    first."""

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
        found = [each for each in self._adapters() if each.name == self._name and each.state == "live"]
        if not found:
            return None
        newest = max(found, key=lambda each: each.version)
        return LiveVersion(
            version=newest.version,
            path=Path(newest.path),
            step=_trainer_step(Path(newest.path) / TENSORS, self._fleet_id),
        )

    def publish(
        self, adapter: LoraAdapter, *, step: int, base_version: int, label: str | None
    ) -> AdapterReport:
        """Make the adapter the next version of its name, on all replicas or on none.

        Raises:
            InvalidRequest: the replicas rejected it.
            Conflict: others loaded the newest version or are loading one, some rejected it, or the files
                cannot be written. The fleet is as it was.
            FleetUnavailable: too few replicas serve, or the controller does not answer.
        """
        began = time.monotonic()
        files = adapter_files(adapter, dtype=self._dtype, fleet_id=self._fleet_id, step=step)
        directory = self._directory / f"step-{step:06d}-{uuid.uuid4().hex[:8]}"
        sending, load_id = threading.Event(), uuid.uuid4().hex

        def written_and_loaded() -> tuple[float, int, str]:
            contents = {name: memoryview(in_host_memory(each).numpy()) for name, each in files.items()}
            hashing = beside.submit(digest_of, contents)
            self._write(directory, contents)
            digest = hashing.result()
            written = time.monotonic()
            sending.wait()  # replicas execute instructions in order, and must receive it first
            return written, self._load(directory, digest, load_id), digest

        transfer_s = None
        try:
            with ThreadPoolExecutor(max_workers=2) as beside:
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
        """Its content never changes, because the fleet's copy may be a hard link. That copy is durable, this
        one is not."""
        partial = final.with_name(f".{final.name}.partial")
        try:
            partial.mkdir(parents=True)
            for name, content in files.items():
                (partial / name).write_bytes(content)
            partial.rename(final)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)  # it may be what fills the disk
            raise Conflict(f"the adapter {self._name!r} is not published: {error}") from error

    def _load(self, directory: Path, digest: str, load_id: str) -> int:
        load = LoadRequest(
            name=self._name,
            path=str(directory),
            in_place=True,
            after=self._own_version(),
            load_id=load_id,
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


def adapter_files(
    adapter: LoraAdapter, *, dtype: torch.dtype | None, fleet_id: str, step: int
) -> dict[str, torch.Tensor]:
    """The bytes of the published files, by name: the same on every rank."""
    return adapter.files(dtype=dtype, metadata={FLEET: fleet_id, STEP: str(step)})


def _trainer_step(file: Path, fleet_id: str) -> int | None:
    try:
        with safe_open(file, framework="pt") as tensors:
            metadata = tensors.metadata() or {}
    except (OSError, SafetensorError):  # being removed, because it was unloaded
        return None
    step = metadata.get(STEP, "")
    return int(step) if step.isdecimal() and metadata.get(FLEET) == fleet_id else None
