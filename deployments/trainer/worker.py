"""One rank of the trainer: the policy, its optimizer and its part of every publish."""

import time
from functools import partial
from pathlib import Path

import ray
import torch

from deployments.errors import InvalidRequest
from deployments.logs import serve_logger
from deployments.lost_calls import repeated
from deployments.protocol.publishing import RoundReport
from deployments.protocol.reports import StoreResult
from deployments.trainer.checkpoint import BaseCheckpoint, summary
from deployments.trainer.messages import LoadedTrainer, StoreStatus
from deployments.trainer.publisher import Publisher
from deployments.trainer.rank import TrainerRank
from deployments.trainer.save_directory import directory_to_save
from deployments.trainer.spec import TrainerSpec
from deployments.trainer.state_file import StateFile, resume
from deployments.trainer.stored_weights import StoredWeights
from deployments.trainer_reports import SavedCheckpoint
from deployments.unary import UnaryHandle
from deployments.weights.store.version_writer import CommittedVersion, VersionWriter
from deployments.weights.store.versions import Store
from trainers.learner import Learner
from trainers.policy import DTYPES
from trainers.sources import ParameterSource

STORED_TIMEOUT_S = 60.0
logger = serve_logger()


class TrainerWorker(TrainerRank):
    """A Ray actor: one rank. Every method is called on all ranks alike, except `store_status` (rank 0) and
    those that `TrainerRank` names."""

    def __init__(self, spec: TrainerSpec, rank: int, controller: UnaryHandle) -> None:
        super().__init__(spec, rank, controller)
        self._store = Store(Path(spec.store_dir))
        self._stored = StoredWeights(self._store, rank)
        self._base = BaseCheckpoint(Path(spec.model))
        self._state_file = StateFile(self._store.directory.parent / "trainer", rank)

    def load(self, rendezvous_address: tuple[str, int]) -> LoadedTrainer:
        """Join the group, load the newest stored version or the model, and be ready for steps.

        Raises:
            ValueError: the model does not suit the trainer, or no version in the store can be used.
            OSError: the checkpoint cannot be read.
        """
        spec = self._spec
        self._begin(rendezvous_address)
        version = self._stored.newest(self._fleet().fleet_id)
        self._policy = self._read(self._store.path_of(version) if version else Path(spec.model))
        reference = self._read(Path(spec.model)) if spec.config.loss.kl_coefficient != 0.0 else None
        self._learner = Learner(self._policy, spec.config, reference=reference)
        if version:
            self._resume(version)
        wire_dtype = spec.config.wire_dtype
        source = self._source(None if wire_dtype is None else DTYPES[wire_dtype])
        self._lacking = self._base.lacking([spec.name for spec in source.specs()])
        self._publisher = Publisher(spec, self._rank, source, self._controller, self._lacking)
        self._writer = VersionWriter(
            write_files=partial(self._write_files, dtype=wire_dtype),
            on_stored=self._report_stored,
            on_failed=self._report_failed,
        )
        if self._lacking and self._rank == 0:
            logger.warning(
                "the trainer's model lacks %d of %d tensors of %s, which replicas keep as loaded: %s",
                len(self._lacking),
                len(self._base.names),
                self._base.directory,
                ", ".join(summary(self._lacking)),
            )
        return LoadedTrainer(
            version=version,
            step=self._learner.steps_done,
            parameters=self._parameters(),
            untrained=summary(self._lacking),
        )

    def publish(self, label: str | None) -> RoundReport | None:
        """Move the fleet to this policy, and begin to write the version to the store.

        Returns:
            The report on rank 0, None elsewhere.

        Raises:
            SlipstreamError: as `Publisher.publish`; the fleet is as it was.
        """
        report = self._publisher.publish(label)
        if report is None:
            return None
        version = CommittedVersion(
            version=report.version,
            label=report.label,
            fleet_id=self._publisher.fleet_id,
            digest=report.digest,
            tensors=self._publisher.source.take_copy(),
            added=self._base.tensors(self._lacking),
            trainer_step=self._learner.steps_done,
        )
        self._writer.put(version, self._store)
        return report

    def save_optimizer_state(self) -> None:
        """Write the optimizer's state and master weights for a restart, after every n-th step
        (`optimizer_state_every`). If that fails, the former state stays and training goes on."""
        every, step = self._spec.optimizer_state_every, self._learner.steps_done
        if step in (0, self._state_file.step) or every == 0 or step % every != 0:
            return  # nothing new: before the first step there are no moments. 15 s at 1.7B in float32
        try:
            self._state_file.write(self._learner.state_dict(wire_dtype=self._spec.config.wire_dtype), step)
        except OSError as error:
            logger.warning(
                "trainer rank %d: the optimizer's state of step %d is not saved, the former one stays: %s",
                self._rank,
                step,
                error,
            )

    def load_version(self, version: int) -> None:
        """Go back to the weights of a stored version; the optimizer's moments start at zero, also after a
        restart.

        Raises:
            InvalidRequest: the version is not in the store, or damaged; nothing has changed.
            OSError: the state file of the former weights cannot be removed.
        """
        try:
            with self._store.reading(version) as directory:
                problem = self._stored.problem(version)
                if problem is not None:
                    raise InvalidRequest(f"version {version} is not loaded: {problem}")
                self._policy.load_weights(directory)
        except FileNotFoundError as error:
            raise InvalidRequest(str(error)) from error
        self._learner.restart(self._learner.steps_done, keep_moments=False)
        self._state_file.remove()

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

    @ray.method(concurrency_group="control")
    def store_status(self) -> StoreStatus:
        """What became of the versions that this rank wrote to the store; answered also during a step."""
        result = self._writer.result
        problem = None
        if result is not None and result.problem:
            problem = f"version {result.version} is not in the store: {result.problem}"
        return StoreStatus(stored_version=self._writer.newest, store_problem=problem)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all versions are written; False if that takes longer than `timeout_s`."""
        return self._writer.wait(timeout_s)

    def _source(self, dtype: torch.dtype | None) -> ParameterSource:
        return ParameterSource(self._policy.model, dtype=dtype, stored=self._base.names)

    def _parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._policy.model.parameters())

    def _resume(self, version: int) -> None:
        step = self._store.manifest_of(version).trainer_step
        if step is None:  # another publisher's version
            step = 0
        difference = resume(self._learner, self._state_file, step)
        if self._rank != 0:
            return
        if difference is None:
            logger.info("the trainer resumes from version %d, step %d", version, step)
        else:
            logger.warning("the trainer resumes from version %d, step %d; %s", version, step, difference)

    def _write_files(self, directory: Path, dtype: str | None) -> None:
        """All but the weights of a checkpoint, whose weights have `dtype`; None: the trainer's own."""
        self._base.write_files(
            directory, self._policy.model, self._spec.config.dtype if dtype is None else dtype
        )

    def _report_failed(self, result: StoreResult) -> None:
        """Joiners wait for it: the fleet's status says why, and the trainer may publish again."""
        try:
            response = self._controller.not_stored.remote(result.version, result.problem)
            response.result(timeout_s=STORED_TIMEOUT_S)
        except Exception as error:  # whatever it was, the status says so later
            logger.warning("the controller does not know that version %d failed: %s", result.version, error)

    def _report_stored(self, result: StoreResult) -> None:
        def report() -> None:
            response = self._controller.stored.remote(result.version, result.path, result.label)
            response.result(timeout_s=STORED_TIMEOUT_S)

        repeated(report, f"stored version {result.version}")
