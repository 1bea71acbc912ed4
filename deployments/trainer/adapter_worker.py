"""One rank of a trainer that publishes an adapter alone.

Every rank holds the whole adapter. Rank 0 writes its two files aside, renames them, and has the controller
load them if the name is still at the version found. If the controller dies, its successor knows the load.

The base is the version committed when the trainer started; no adapter of another base is published. Versions
that others loaded under the name are never replaced: this trainer's name the fleet and its step.
"""

import hashlib
import json
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from deployments.calls.rpc import CallHandle, retried, run_sync
from deployments.host.logs import serve_logger
from deployments.protocol.adapters import LOAD_TIMEOUT_S, AdapterStatus, LoadRequest
from deployments.protocol.adapters import Adapter as LiveAdapter
from deployments.protocol.errors import Conflict, InvalidRequest
from deployments.protocol.responses import AdapterReport, SavedCheckpoint
from deployments.trainer.host_copies import in_host_memory
from deployments.trainer.restart_checkpoints import restore, resume
from deployments.trainer.spec import LoadedTrainer, StoreStatus, TrainerSpec, adapter_directory
from deployments.trainer.stored_weights import from_rank_0
from deployments.trainer.worker import TrainerRank, adapter_settings, directory_to_save
from deployments.weights.store.adapter_store import TENSORS, digest_of
from trainers.learner import Learner
from trainers.lora import LoraAdapter
from trainers.settings import LoraConfig
from trainers.trained_policy import BaseOf

CALL_TIMEOUT_S = 60.0
FLEET, STEP, LABELS = "fleet_id", "trainer_step", "trainer_labels"  # metadata of the safetensors file
logger = serve_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Live:
    version: int
    path: Path
    step: int | None  # None: others loaded the version
    labels: Sequence[str]  # newest steps'
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)  # empty until read


class AdapterWorker(TrainerRank):
    """Has the calls of `TrainerWorker`, except those about versions of all weights."""

    def __init__(self, spec: TrainerSpec, rank: int, controller: CallHandle) -> None:
        super().__init__(spec, rank, controller)
        lora = spec.config.published_adapter
        assert lora is not None, "this worker publishes an adapter"
        self._lora: LoraConfig = lora
        # Adapter names may have characters that file names may not.
        self._file_name = hashlib.sha256(lora.name.encode()).hexdigest()[:12]
        self._directory = adapter_directory(spec.store_dir)  # holds the files until the fleet has its copy

    @property
    def _adapter(self) -> LoraAdapter:
        assert self._policy.adapter is not None, "this worker trains an adapter"
        return self._policy.adapter

    def load(self, rendezvous_address: tuple[str, int]) -> LoadedTrainer:
        """Join the group, load the base, and continue the adapter. Raises ValueError (no such modules, or
        other settings) or OSError."""
        self._begin(rendezvous_address)
        self._fleet_id = self._fleet().fleet_id
        self._check_owner()
        found = self._stored.find(self._fleet)
        self._base_version = found.version
        if found.version != found.committed and self._rank == 0:
            logger.error(
                "nothing can be published: the adapter's base is version %d, and version %d is committed: %s",
                found.version,
                found.committed,
                found.problem,
            )
        base = self._store.path_of(self._base_version) if self._base_version else self._base.directory
        self._policy = self._read(base, self._lora)
        self._check_names()
        reference = BaseOf(self._policy) if self._spec.config.loss.kl_coefficient != 0.0 else None
        self._learner = Learner(self._policy, self._spec.config, reference=reference)
        self._open_checkpoints(f"lora-{self._file_name}")
        if self._rank == 0:
            shutil.rmtree(self._directory, ignore_errors=True)
        published = from_rank_0(self._published() if self._rank == 0 else None)
        difference = self._resume(published)
        self._labels = () if published is None else tuple(published.labels)
        self._log_resumed(f"trains the adapter {self._lora.name!r}", difference)
        return LoadedTrainer(
            version=self._base_version,
            step=self._learner.steps_done,
            labels=self._labels,
            parameters=sum(parameter.numel() for parameter in self._policy.parameters()),
            adapter_version=0 if published is None else published.version,
            initial=self._initial,
        )

    def publish(self, label: str | None) -> AdapterReport | None:
        """Make the adapter the next version of its name, on all replicas or on none.

        Raises:
            InvalidRequest: the replicas rejected it.
            Conflict: the fleet serves another base, others loaded the newest version or are loading one, or
                the files cannot be written.
            FleetUnavailable: too few replicas serve, or the controller does not answer.
        """
        if self._rank != 0:
            return None
        self._check_base()
        began, step = time.monotonic(), self._learner.steps_done
        metadata = {FLEET: self._fleet_id, STEP: str(step), LABELS: json.dumps(self._labels)}
        files = self._adapter.files(dtype=self._wire_dtype(), metadata=metadata)
        contents = {name: memoryview(in_host_memory(each).numpy()) for name, each in files.items()}
        directory = self._directory / f"step-{step:06d}-{uuid.uuid4().hex[:8]}"
        try:
            with ThreadPoolExecutor(max_workers=1) as beside:
                hashing = beside.submit(digest_of, contents)
                self._write(directory, contents)
                digest = hashing.result()
            written = time.monotonic()
            version = self._load_into_fleet(directory, digest)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return AdapterReport(
            name=self._lora.name,
            version=version,
            label=label,
            step=step,
            base_version=self._base_version,
            digest=digest,
            size_bytes=files[TENSORS].numel(),
            write_s=written - began,
            duration_s=time.monotonic() - began,
        )

    def _check_base(self) -> None:
        committed = self._fleet().committed_version
        if committed != self._base_version:
            raise Conflict(
                f"the adapter {self._lora.name!r} was trained on version {self._base_version}, and the fleet "
                f"serves version {committed}: restart the trainer to take that as its base",
                {"expected": self._base_version, "version": committed},
            )

    def _write(self, final: Path, files: Mapping[str, memoryview]) -> None:
        """The content never changes: the fleet's durable copy may be a hard link."""
        partial = final.with_name(f".{final.name}.partial")
        try:
            partial.mkdir(parents=True)
            for name, content in files.items():
                (partial / name).write_bytes(content)
            partial.rename(final)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)  # it may be what fills the disk
            raise Conflict(f"the adapter {self._lora.name!r} is not published: {error}") from error

    def _load_into_fleet(self, directory: Path, digest: str) -> int:
        name, newest = self._lora.name, self._newest()
        if newest is not None and newest.step is None:
            raise Conflict(
                f"{name}@{newest.version} was not published by this fleet's trainer: unload it, or "
                "choose another 'trainer.lora.name'",
                {"lora_name": name, "version": newest.version},
            )
        load = LoadRequest(
            name=name,
            path=str(directory),
            in_place=True,
            after=0 if newest is None else newest.version,
            load_id=uuid.uuid4().hex,
            digest=digest,
        )
        live: LiveAdapter = run_sync(retried(self._controller, "load_adapter", load, limit_s=LOAD_TIMEOUT_S))
        return live.version

    def _newest(self) -> _Live | None:
        listed: Sequence[AdapterStatus] = run_sync(
            retried(self._controller, "adapters", limit_s=CALL_TIMEOUT_S)
        )
        found = [each for each in listed if each.name == self._lora.name and each.state == "live"]
        if not found:
            return None
        newest = max(found, key=lambda each: each.version)
        step, labels = _origin(Path(newest.path) / TENSORS, self._fleet_id)
        return _Live(version=newest.version, path=Path(newest.path), step=step, labels=labels)

    def save_checkpoint(self) -> None:
        settings = adapter_settings(self._lora, self._base_version)
        self._save_checkpoint(every=1, adapter=settings)

    def save(self, path: str | None) -> SavedCheckpoint | None:
        """Write the adapter in peft's format. Returns the report on rank 0; None elsewhere: a late rank would
        find rank 0's files in `path`."""
        if self._rank != 0:
            return None
        started, step = time.perf_counter(), self._learner.steps_done
        default = self._store.directory / f"adapter-{self._file_name}-{step:06d}"
        directory = directory_to_save(path, default, self._check_owner)
        try:
            self._adapter.write(directory)
        except OSError as error:
            raise InvalidRequest(f"the adapter cannot be written to {directory}: {error}") from error
        return SavedCheckpoint(
            path=str(directory.absolute()), step=step, save_s=time.perf_counter() - started
        )

    def store_status(self) -> StoreStatus:
        return StoreStatus(stored_version=None, store_problem=None)

    def flush_version(self, timeout_s: float) -> bool:
        return True  # the fleet keeps what it has published

    def flush(self, timeout_s: float) -> bool:
        return self._checkpoints.wait(timeout_s)

    def _check_names(self) -> None:
        """Raises ValueError if the checkpoint, and so an engine, names an adapted module differently."""
        names = self._base.names
        lost = [module for module in self._adapter.modules() if f"{module}.weight" not in names]
        if names and lost:
            raise ValueError(
                f"LoRA is not possible here: {self._base.directory} has no {lost[0]}.weight ({len(lost)} "
                "modules have other names in the checkpoint than in the trainer's model); leave them out of "
                "'trainer.lora.target_modules'"
            )

    def _published(self) -> _Live | None:
        live = self._newest()
        if live is None or live.step is None:
            if live is not None:
                logger.warning(
                    "%s@%d was not published by this trainer, which will not publish while it is live",
                    self._lora.name,
                    live.version,
                )
            return None
        try:
            values = self._adapter.read(live.path)
        except ValueError as error:
            raise ValueError(
                f"version {live.version} of the adapter is live, and is not one of this trainer's settings: "
                f"{error}; choose another 'trainer.lora.name', or unload it"
            ) from error
        return replace(live, values=values)

    def _resume(self, published: _Live | None) -> str | None:
        """Continue from the newest checkpoint, or from the live version if that is newer. Returns the
        difference, for the log."""
        found = self._checkpoints.complete()
        own = adapter_settings(self._lora, self._base_version)
        for path, meta in found:
            saved = dict(meta.adapter or {})
            for key in ("rank", "alpha", "target_modules"):
                if saved.get(key) != own[key]:
                    raise ValueError(
                        f"{path} is of another adapter: {key!r} must be {own[key]}, got {saved.get(key)}; "
                        "choose another 'trainer.lora.name', or move it away to start from zero"
                    )
        problems, step = [], None if published is None else published.step
        for path, meta in found:
            if step is not None and meta.step < step:
                break
            problem = restore(self._learner, self._checkpoints, path, meta, exact=True)
            if problem is None:
                self._learner.restart(meta.step, keep_moments=True)
                self._checkpoints.step = meta.step
                self._log_new_base(meta.adapter)
                return None
            problems.append(problem)
        if published is None or step is None:
            self._learner.restart(0, keep_moments=False)
            return "; ".join(problems) or None
        self._adapter.restore(published.values)
        difference = resume(self._learner, self._checkpoints, found, step)
        return difference if step else None  # before the first step there are no moments

    def _log_new_base(self, saved: Mapping[str, object] | None) -> None:
        before = None if saved is None else saved["base_version"]
        if self._rank == 0 and before != self._base_version:
            logger.warning(
                "the adapter %r was trained on version %s, and continues on version %d",
                self._lora.name,
                before,
                self._base_version,
            )


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
