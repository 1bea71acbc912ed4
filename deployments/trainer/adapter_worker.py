"""One rank of a trainer that publishes an adapter alone. Every rank holds the whole adapter; rank 0 publishes
it. The base is the version that was committed when the trainer started; an adapter of another base is not
published."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from deployments.calls.rpc import CallHandle
from deployments.host.logs import serve_logger
from deployments.protocol.errors import Conflict, InvalidRequest
from deployments.protocol.responses import AdapterReport, SavedCheckpoint
from deployments.trainer.adapter_publisher import AdapterPublisher, LiveVersion
from deployments.trainer.restart_checkpoints import restore, resume
from deployments.trainer.spec import LoadedTrainer, StoreStatus, TrainerSpec, adapter_directory
from deployments.trainer.stored_weights import from_rank_0
from deployments.trainer.worker import TrainerRank, adapter_settings, directory_to_save
from trainers.learner import Learner
from trainers.lora import LoraAdapter
from trainers.settings import LoraConfig
from trainers.trained_policy import BaseOf

logger = serve_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Published:
    version: int
    step: int
    labels: Sequence[str]
    values: Mapping[str, torch.Tensor]


class AdapterWorker(TrainerRank):
    """Has the calls of `TrainerWorker`, except those about versions of all weights."""

    def __init__(self, spec: TrainerSpec, rank: int, controller: CallHandle) -> None:
        super().__init__(spec, rank, controller)
        lora = spec.config.published_adapter
        assert lora is not None, "this worker publishes an adapter"
        self._lora: LoraConfig = lora
        # An adapter's name may have characters that a file name may not.
        self._file_name = hashlib.sha256(lora.name.encode()).hexdigest()[:12]

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
            self._publisher = AdapterPublisher(
                self._lora.name,
                self._controller,
                adapter_directory(self._spec.store_dir),
                fleet_id=self._fleet_id,
                dtype=self._wire_dtype(),
            )
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
        """As `AdapterPublisher.publish`. Conflict also: the fleet serves another base."""
        if self._rank != 0:
            return None
        committed = self._fleet().committed_version
        if committed != self._base_version:
            raise Conflict(
                f"the adapter {self._lora.name!r} was trained on version {self._base_version}, and the fleet "
                f"serves version {committed}: restart the trainer to take that as its base",
                {"expected": self._base_version, "version": committed},
            )
        return self._publisher.publish(
            self._adapter,
            step=self._learner.steps_done,
            labels=self._labels,
            base_version=self._base_version,
            label=label,
        )

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

    def _published(self) -> _Published | None:
        live: LiveVersion | None = self._publisher.newest()
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
        return _Published(version=live.version, step=live.step, labels=live.labels, values=values)

    def _resume(self, published: _Published | None) -> str | None:
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
        problems = []
        for path, meta in found:
            if published is not None and meta.step < published.step:
                break
            problem = restore(self._learner, self._checkpoints, path, meta, exact=True)
            if problem is None:
                self._learner.restart(meta.step, keep_moments=True)
                self._checkpoints.step = meta.step
                self._log_new_base(meta.adapter)
                return None
            problems.append(problem)
        if published is None:
            self._learner.restart(0, keep_moments=False)
            return "; ".join(problems) or None
        self._adapter.restore(published.values)
        difference = resume(self._learner, self._checkpoints, found, published.step)
        return difference if published.step else None  # before the first step there are no moments

    def _log_new_base(self, saved: Mapping[str, object] | None) -> None:
        before = None if saved is None else saved["base_version"]
        if self._rank == 0 and before != self._base_version:
            logger.warning(
                "the adapter %r was trained on version %s, and continues on version %d",
                self._lora.name,
                before,
                self._base_version,
            )
