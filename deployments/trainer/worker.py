"""One rank of the trainer: the policy, its optimizer and its part of every publish."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue

from deployments.calls.rpc import CallHandle, retried, run_sync
from deployments.host.logs import serve_logger
from deployments.host.thread_priority import YieldingThread
from deployments.protocol.errors import InvalidRequest
from deployments.protocol.poll import StoreResult
from deployments.protocol.publishing import RoundReport
from deployments.protocol.responses import SavedCheckpoint
from deployments.trainer.checkpoint import summary
from deployments.trainer.checkpoints import Checkpoints
from deployments.trainer.lora.resume import MergedAdapter
from deployments.trainer.publisher import Publisher
from deployments.trainer.rank import TrainerRank, directory_to_save
from deployments.trainer.resume import resume
from deployments.trainer.spec import LoadedTrainer, StoreStatus, TrainerSpec
from deployments.trainer.stored_weights import StoredWeights
from deployments.weights.store.version_writer import SHARE_OF_A_CORE, CommittedVersion, VersionWriter
from deployments.weights.store.versions import Store
from trainers.learner import Learner
from trainers.policy import DTYPES, BaseOf, Policy
from trainers.sources import ParameterSource
from trainers.step_metrics import Metrics

CHECKPOINTS_KEPT = 2  # the one before stays in case the newest cannot be read
STORED_TIMEOUT_S = 60.0
NICE = 10  # of a publish, on a CPU: streams wait for it more than it for them
logger = serve_logger()


class TrainerWorker(TrainerRank):
    """One rank of a trainer of all weights. Every method is called on all ranks alike, except `store_status`
    (rank 0)."""

    def __init__(self, spec: TrainerSpec, rank: int, controller: CallHandle) -> None:
        super().__init__(spec, rank, controller)
        self._store = Store(Path(spec.store_dir))
        self._stored = StoredWeights(self._store, rank)
        self._merged: MergedAdapter | None = None
        if spec.config.lora is not None:
            self._merged = MergedAdapter(spec.config.lora, self._store, self._stored)
        self._publish_thread = YieldingThread(NICE)
        self._digest: str | None = None  # of the version that was published last; on rank 0
        self._frozen: dict[str, torch.Tensor] = {}  # what the checkpoint has beside the model's tensors

    def load(self, rendezvous_address: tuple[str, int]) -> LoadedTrainer:
        """Join the group, load the newest stored version or the model, and be ready for steps.

        Raises:
            ValueError: the model does not suit the trainer, or no version in the store can be used.
            OSError: the checkpoint cannot be read.
        """
        self._begin(rendezvous_address)
        spec = self._spec
        fleet_id = self._fleet().fleet_id
        version = self._stored.newest(fleet_id)
        self._checkpoints = Checkpoints(
            self._store.directory.parent / "trainer" / "checkpoints",
            rank=self._rank,
            keep=CHECKPOINTS_KEPT,
        )
        if self._merged is None:
            directory = self._store.path_of(version) if version else self._base.directory
            self._policy = self._read(directory)
        else:
            directory = self._merged.find_base(self._checkpoints, version, fleet_id, self._base.directory)
            self._policy = self._read(directory, self._merged.config)
        self._learner = Learner(self._policy, spec.config, reference=self._reference())
        wire_dtype = spec.config.wire_dtype
        source = self._source(None if wire_dtype is None else DTYPES[wire_dtype])
        self._frozen |= self._base.read(self._base.frozen([spec.name for spec in source.specs()]), directory)
        if version:
            self._resume(version, fleet_id)
        self._publisher = Publisher(spec, self._rank, source, self._controller)
        self._writer = VersionWriter(
            write_files=partial(self._write_files, dtype=wire_dtype),
            on_stored=self._report_stored,
            on_failed=self._report_failed,
            share=SHARE_OF_A_CORE if spec.device == "cpu" else 1.0,
        )
        untrained = summary([*self._frozen])
        if untrained and self._rank == 0:
            logger.warning(
                "the trainer's model lacks %d of %d tensors of %s, which stay as they are: %s",
                len(self._frozen),
                len(self._base.names),
                self._base.directory,
                ", ".join(untrained),
            )
        return LoadedTrainer(
            version=version,
            step=self._learner.steps_done,
            parameters=self._parameters(),
            untrained=untrained,
        )

    def step(self, trajectories: Sequence[JsonValue] | bytes, published: int | None = None) -> Metrics:
        """As `TrainerRank.step`."""
        self._checkpoints.wait_until_copied()
        return super().step(trajectories, published)

    def publish(self, label: str | None) -> RoundReport | None:
        """Move the fleet to this policy, and begin to write the version to the store.

        Returns:
            The report on rank 0, None elsewhere.

        Raises:
            SlipstreamError: as `Publisher.publish`; the fleet is as it was.
        """
        publish = partial(self._publish, label)
        return publish() if self._spec.device != "cpu" else self._publish_thread.run(publish)

    def _publish(self, label: str | None) -> RoundReport | None:
        report = self._publisher.publish(label)
        if report is None:
            return None
        self._digest = report.digest
        version = CommittedVersion(
            version=report.version,
            label=report.label,
            fleet_id=self._publisher.fleet_id,
            digest=report.digest,
            tensors=self._publisher.source.take_copy(),
            trainer_step=self._learner.steps_done,
        )
        self._writer.put(version, self._store)
        return report

    def save_checkpoint(self) -> None:
        """Begin to write a checkpoint for a restart, after every n-th step (`trainer.checkpoint_every`). If
        that fails, the former ones stay and training goes on."""
        step, every = self._learner.steps_done, self._spec.config.checkpoint_every
        if self._merged is not None:
            every = min(every, 1)  # it is small, and without it the adapter begins anew
        if every == 0 or step == 0:
            return  # before the first step there are no moments
        since = step - (self._checkpoints.step or 0)
        self._checkpoints.save(
            self._learner,
            wire_dtype=self._spec.config.wire_dtype,
            fleet_id=self._publisher.fleet_id,
            adapter=self._about_adapter(),
            digest=self._digest,
            due=since != 0 and (since >= every or step % every == 0),
        )

    def load_version(self, version: int) -> None:
        """Go back to the weights of a stored version; the optimizer's moments start at zero, also after a
        restart.

        Raises:
            InvalidRequest: the version is not in the store, or damaged; nothing has changed.
            OSError: a checkpoint of the former weights cannot be removed.
        """
        self._checkpoints.wait_until_copied()
        try:
            with self._store.reading(version) as directory:
                problem = self._stored.problem(version)
                if problem is not None:
                    raise InvalidRequest(f"version {version} is not loaded: {problem}")
                self._begin_anew(version, directory, self._learner.steps_done)
        except FileNotFoundError as error:
            raise InvalidRequest(str(error)) from error
        self._checkpoints.discard()

    def save(self, path: str | None) -> SavedCheckpoint:
        """Write an ordinary checkpoint of the weights as they are now.

        Args:
            path: an absolute path of a new or empty directory; None: one beside the store, named by the step.

        Raises:
            InvalidRequest: `path` is not such a directory, or its disk is full.
        """
        started = time.perf_counter()
        default = self._store.directory.parent / f"checkpoint-{self._learner.steps_done:06d}"
        directory = directory_to_save(path, default)
        weights = {}
        for name, tensor in self._source(None):  # every rank gathers, rank 0 writes
            if self._rank == 0:
                weights[name] = tensor.to("cpu")
        if self._rank == 0:
            self._base.write(directory, self._policy.model, self._spec.config.dtype, weights)
        return SavedCheckpoint(
            path=str(directory.absolute()),
            step=self._learner.steps_done,
            save_s=time.perf_counter() - started,
        )

    def store_status(self) -> StoreStatus:
        """What became of the versions that this rank wrote to the store; answered also during a step."""
        result = self._writer.result
        problem = None
        if result is not None and result.problem:
            problem = f"version {result.version} is not in the store: {result.problem}"
        return StoreStatus(stored_version=self._writer.newest, store_problem=problem)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all versions and the checkpoint are written; False if that takes longer."""
        began = time.monotonic()
        written = self._writer.wait(timeout_s)
        left = max(0.0, timeout_s - (time.monotonic() - began))
        return self._checkpoints.wait(left) and written

    def _source(self, dtype: torch.dtype | None) -> ParameterSource:
        adapter, stored = self._policy.adapter, self._base.names
        return ParameterSource(
            self._policy.model, adapter=adapter, dtype=dtype, stored=stored, frozen=self._frozen
        )

    def _reference(self) -> Policy | BaseOf | None:
        """What the KL penalty compares with: the model."""
        if self._spec.config.loss.kl_coefficient == 0.0:
            return None
        if self._merged is not None and self._merged.base_version == 0:
            return BaseOf(self._policy)
        return self._read(Path(self._spec.model))

    def _about_adapter(self) -> Mapping[str, Any] | None:
        return None if self._merged is None else self._merged.about()

    def _parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._policy.model.parameters())

    def _resume(self, version: int, fleet_id: str | None) -> None:
        manifest = self._store.manifest_of(version)
        step = 0 if manifest.trainer_step is None else manifest.trainer_step  # None: another publisher's
        difference = resume(
            self._learner, self._checkpoints, step, fleet_id, self._about_adapter(), manifest.digest
        )
        if self._merged is not None and difference is not None:
            self._begin_anew(version, self._store.path_of(version), step)
            difference = f"the adapter begins anew on it: {difference}"
        if self._rank != 0:
            return
        if difference is None:
            logger.info("the trainer resumes from version %d, step %d", version, step)
        else:
            logger.warning("the trainer resumes from version %d, step %d; %s", version, step, difference)

    def _begin_anew(self, version: int, directory: Path, step: int) -> None:
        """With the weights of a stored version, and an adapter on them that changes nothing yet."""
        if isinstance(self._learner.reference, BaseOf):  # which will not be the model any more
            self._learner.reference = self._read(Path(self._spec.model))
        self._policy.load_weights(directory)
        self._frozen |= self._base.read(self._frozen, directory)
        if self._merged is not None:
            self._merged.base_version = version
        self._learner.restart(step, keep_moments=False)

    def _write_files(self, directory: Path, dtype: str | None) -> None:
        """All but the weights of a checkpoint, whose weights have `dtype`; None: the trainer's own."""
        self._base.write_files(
            directory, self._policy.model, self._spec.config.dtype if dtype is None else dtype
        )

    def _report_failed(self, result: StoreResult) -> None:
        """Joiners wait for it: the fleet's status says why, and the trainer may publish again."""
        try:
            self._report("not_stored", result.version, result.problem)
        except Exception as error:  # whatever it was, the status says so later
            logger.warning("the controller does not know that version %d failed: %s", result.version, error)

    def _report_stored(self, result: StoreResult) -> None:
        self._report("stored", result.version, result.path, result.label)

    def _report(self, method: str, *args: Any) -> None:
        report = getattr(self._controller, method)
        run_sync(retried(lambda: report.remote(*args), method, limit_s=STORED_TIMEOUT_S))
