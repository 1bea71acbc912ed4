"""One rank of the trainer: it reads a model, learns, and takes part in every publish."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import JsonValue

from deployments.calls.rpc import CallHandle, retried, run_sync
from deployments.host.logs import serve_logger
from deployments.host.network import interface_of
from deployments.protocol.errors import InvalidRequest, JournalError
from deployments.protocol.poll import InitialWeights, StoredVersion, StoreResult
from deployments.protocol.publishing import RoundReport
from deployments.protocol.responses import FleetStatus, SavedCheckpoint
from deployments.trainer.base_checkpoint import BaseCheckpoint, summary
from deployments.trainer.fleet_connection import free_port, own_address
from deployments.trainer.restart_checkpoints import RestartCheckpoints, resume
from deployments.trainer.spec import LABELS_KEPT, LoadedTrainer, StoreStatus, TrainerSpec, state_directory
from deployments.trainer.stored_weights import Found, StoredWeights, from_rank_0
from deployments.trainer.weight_publisher import WeightPublisher
from deployments.weights.store.hub import downloaded, model_files, read_schema
from deployments.weights.store.initial_checkpoint import InitialCheckpoint
from deployments.weights.store.owner import check_owner, own
from deployments.weights.store.version_writer import CommittedVersion, VersionWriter, read_tensors
from deployments.weights.store.versions import DRAFTER_DIRECTORY, Store, VersionManifest
from deployments.weights.transports.weight_sender import gather_from_ranks
from deployments.weights.wire.proof_sequences import proof_sequences
from trainers.fsdp2 import mesh_of_all_ranks
from trainers.images import check_images
from trainers.learner import Learner, OutOfMemory
from trainers.settings import LoraConfig, StepSettings, Strategy
from trainers.sources import DRAFTER, ParameterSource
from trainers.step_metrics import Metrics, drift
from trainers.teachers import check_teachers
from trainers.trained_policy import DTYPES, BaseOf, TrainedPolicy
from trainers.trajectory import parse_trajectories
from trainers.trajectory_arrays import from_bytes, settings_of

if TYPE_CHECKING:
    from trainers.drafter import TrainedDrafter

CHECKPOINTS_KEPT = 2  # the older one in case the newest is unreadable
STORED_TIMEOUT_S = 60.0
SEED = 0  # an adapter's first weights are equal on all ranks
logger = serve_logger()


class TrainerRank:
    """Base of both workers. Every method is called on all ranks alike."""

    _base: BaseCheckpoint
    _checkpoint: InitialCheckpoint
    _policy: TrainedPolicy
    _learner: Learner
    _checkpoints: RestartCheckpoints
    _fleet_id: str
    _version_0: InitialWeights | None  # the fleet's
    _reads_files: bool  # rank 0, and ranks on other hosts, compare a directory's files with it

    def __init__(self, spec: TrainerSpec, rank: int, controller: CallHandle) -> None:
        self._spec = spec
        self._rank = rank
        self._controller = controller
        self._store = Store(Path(spec.store_dir))
        self._stored = StoredWeights(self._store, rank, self._told, shared=spec.store_keep is None)
        self._initial: InitialWeights | None = None
        self._labels: tuple[str, ...] = ()  # the newest steps in the weights

    def rendezvous_address(self) -> tuple[str, int]:
        return own_address(), free_port()

    def step(
        self,
        trajectories: Sequence[JsonValue] | bytes,
        published: int | None = None,
        settings: Mapping[str, JsonValue] | None = None,
        label: str | None = None,
    ) -> Metrics:
        """As `Trainer.step`. Raises InvalidRequest: the batch is invalid or exceeds memory;
        nothing changed."""
        self._checkpoints.wait_until_copied()
        try:
            given = StepSettings.read(
                settings_of(trajectories) if isinstance(trajectories, bytes) else settings
            )
            loss = given.applied(self._spec.config).loss
            sampled = loss.has_rollouts
            parsed = parse_trajectories(
                from_bytes(trajectories, sampled=sampled)
                if isinstance(trajectories, bytes)
                else trajectories,
                vocabulary_size=self._policy.vocabulary_size,
                max_length=self._policy.max_length,
                sampled=sampled,
            )
            check_images(parsed, self._policy.images)
            self._policy.routing.check(parsed)
            check_teachers(parsed, loss, self._policy.vocabulary_size)
            self._learner.apply(given)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        try:
            metrics = self._learner.step(parsed, published=published)
        except OutOfMemory as error:
            if self._spec.config.world_size > 1:
                raise  # the other ranks wait in a collective: all are restarted together
            raise InvalidRequest(str(error)) from None
        finally:
            if self._policy.images is not None:
                self._policy.images.forget()
        if label is not None:
            self._labels = (*self._labels, label)[-LABELS_KEPT:]
        sentence = drift(metrics)
        if sentence is not None and self._rank == 0:
            logger.warning(sentence)
        return metrics

    def _begin(self, rendezvous_address: tuple[str, int]) -> None:
        """Find the model on this rank's host, seed, and join the other ranks. Raises ValueError: no such
        model, or it is not version 0."""
        model, revision, self._version_0 = self._spec.model, self._spec.revision, self._fleet().initial
        self._reads_files = self._rank == 0 or own_address() != rendezvous_address[0]
        self._checkpoint = InitialCheckpoint(model, revision)
        if not Path(model).is_dir():
            self._initial = self._checkpoint.check(self._version_0)
        commit = None if self._initial is None else self._initial.commit
        # Before joining the group, whose other ranks would wait for the download.
        self._spec = replace(self._spec, model=str(downloaded(model, commit or revision)))
        self._base = BaseCheckpoint(Path(self._spec.model))
        torch.manual_seed(SEED)
        if self._spec.config.compute_dtype is not None and self._spec.device == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32, for products that autocast leaves
        if self._spec.config.strategy != Strategy.FSDP2:
            return
        host, port = rendezvous_address
        os.environ |= {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "RANK": str(self._rank),
            "WORLD_SIZE": str(self._spec.config.world_size),
            "LOCAL_RANK": "0",  # Ray shows each actor only its own devices
        }
        # Gloo's default is the address of this host's name: where that does not resolve, the ranks hang.
        if interface := interface_of(own_address()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if self._spec.device == "cuda" else "gloo")

    def _check_model(self) -> None:
        """Raises ValueError: the model is not version 0, or differs between hosts."""
        if self._initial is None and self._reads_files:
            self._initial = self._checkpoint.check(self._version_0)
        found = {str(each) for each in gather_from_ranks(self._initial) if each is not None}
        if len(found) > 1:
            model = self._base.directory
            raise ValueError(f"{model} is not the same on all hosts of the trainer: {sorted(found)}")

    def _read(self, directory: Path, lora: LoraConfig | None = None) -> TrainedPolicy:
        config = self._spec.config
        if directory == self._base.directory:
            self._check_model()
        is_sharded = config.strategy == Strategy.FSDP2
        policy = TrainedPolicy.load(
            directory,
            dtype=config.dtype,
            device="cuda:0" if self._spec.device == "cuda" else "cpu",
            mesh=mesh_of_all_ranks(self._spec.device) if is_sharded else None,
            compute_dtype=config.compute_dtype,
            activation_checkpointing=config.activation_checkpointing,
            compile_layers=config.compile_layers,
            packed=config.packed,
            trust_remote_code=self._spec.trust_remote_code,
            vision=config.vision,
        )
        if (changed := self._checkpoint.changed()) is not None:
            raise ValueError(changed)
        if lora is not None:
            policy.adapt(lora, seed=SEED)
        return policy

    def _open_checkpoints(self, name: str) -> None:
        self._checkpoints = RestartCheckpoints(
            state_directory(self._spec.store_dir) / name,
            rank=self._rank,
            keep=CHECKPOINTS_KEPT,
            check_owner=self._check_owner,
        )

    def _save_checkpoint(
        self,
        *,
        every: int,
        adapter: Mapping[str, Any] | None,
        digest: str | None = None,
    ) -> None:
        step = self._learner.steps_done
        if every == 0 or step == 0:
            return  # before the first step there are no moments
        since = step - (self._checkpoints.step or 0)
        self._checkpoints.save(
            self._learner,
            wire_dtype=self._spec.config.wire_dtype,
            adapter=adapter,
            digest=digest,
            due=since != 0 and (since >= every or step % every == 0),
        )

    def _log_resumed(self, what: str, difference: str | None) -> None:
        if self._rank != 0:
            return
        if difference is None:
            logger.info("the trainer %s, step %d", what, self._learner.steps_done)
        else:
            logger.warning("the trainer %s, step %d; %s", what, self._learner.steps_done, difference)

    def _wire_dtype(self) -> torch.dtype | None:
        name = self._spec.config.wire_dtype
        return None if name is None else DTYPES[name]

    def _check_owner(self) -> None:
        check_owner(self._store.directory, self._fleet_id)

    def _told(self, version: int, path: str) -> StoredVersion:
        told: StoredVersion = run_sync(retried(self._controller, "stored_version", version, path))
        return told

    def _fleet(self) -> FleetStatus:
        return run_sync(retried(self._controller, "fleet"))


class TrainerWorker(TrainerRank):
    """One rank of a trainer of all weights, or of an adapter merged into its base at each publish. An adapter
    that cannot resume exactly starts from zero on the stored version."""

    def __init__(self, spec: TrainerSpec, rank: int, controller: CallHandle) -> None:
        super().__init__(spec, rank, controller)
        self._merged = spec.config.lora
        self._base_version = 0  # the adapter's base; 0: the model
        self._digest: str | None = None
        self._frozen: dict[str, torch.Tensor] = {}

    def load(self, rendezvous_address: tuple[str, int]) -> LoadedTrainer:
        """Join the group and load `StoredWeights.find`'s version. Raises ValueError (an unsuitable model, or
        no usable version) or OSError."""
        self._begin(rendezvous_address)
        spec = self._spec
        self._fleet_id = self._fleet().fleet_id
        if spec.store_keep is not None:
            own(self._store.directory, self._fleet_id)
        self._check_owner()
        found = self._stored.find(self._fleet)
        if spec.store_keep is not None:  # starts that fetch and never publish
            self._store.remove_old(self._fleet_id, spec.store_keep)
        version, missed = found.version, _missed(found)
        if missed is not None and self._rank == 0:
            logger.error(missed)
        self._open_checkpoints("checkpoints")
        if self._merged is None:
            directory = self._directory_of(version)
        else:
            self._base_version = self._find_base(version)
            directory = self._directory_of(self._base_version)
        self._base.files = model_files(directory)
        self._policy = self._read(directory, self._merged)
        if spec.config.drafter is not None:
            self._policy.attach_drafter(spec.config.drafter)
            self._load_drafter(self._directory_of(version))
        self._learner = Learner(self._policy, spec.config, reference=self._reference())
        source = self._source(self._wire_dtype())
        self._frozen |= self._base.read(self._base.frozen([spec.name for spec in source.specs()]), directory)
        if version:
            self._resume(version)
        self._publisher = WeightPublisher(spec, self._rank, source, self._controller)
        self._writer = VersionWriter(
            write_files=partial(self._write_files, dtype=spec.config.wire_dtype),
            report=self._report,
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
            missed=missed,
            step=self._learner.steps_done,
            labels=self._labels,
            parameters=sum(parameter.numel() for parameter in self._policy.model.parameters()),
            untrained=untrained,
            fleet_id=self._fleet_id,
            initial=self._initial,
        )

    def publish(self, label: str | None, after: int | None = None) -> RoundReport | None:
        """Move the fleet to this policy, and begin to store the version. Returns the report on rank 0. Raises
        as `WeightPublisher.publish`."""
        if self._spec.device != "cpu":
            return self._publish(label, after)
        # Copying on every core would delay all matrix products of this host's engines.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._publish(label, after)
        finally:
            torch.set_num_threads(threads)

    def _publish(self, label: str | None, after: int | None) -> RoundReport | None:
        report = self._publisher.publish(label, after)
        return None if report is None else self._adopt(report, self._publisher.source.take_copy())

    def adopt(self, report: RoundReport) -> None:
        """Store the version of a round whose answer was lost. Call it before the next step."""
        if self._rank == 0:
            self._adopt(report, self._publisher.unanswered)

    def _adopt(self, report: RoundReport, tensors: Mapping[str, torch.Tensor]) -> RoundReport:
        self._digest = report.digest
        version = CommittedVersion(
            version=report.version,
            label=report.label,
            fleet_id=self._fleet_id,
            digest=report.digest,
            tensors=tensors,
            trainer_step=self._learner.steps_done,
            trainer_labels=self._labels,
        )
        self._writer.put(version, self._store)
        return report

    def score(self) -> tuple[float, ...]:
        """The proof of policy: the trainer's scores. Call it before the next step."""
        sequences = proof_sequences(self._spec.proof_sequences, self._policy.vocabulary_size)
        mine = self._learner.score([(each.prompt, each.token) for each in sequences])
        found = {index: value for part in gather_from_ranks(mine) for index, value in part.items()}
        return tuple(found[index] for index in range(len(sequences)))

    def save_checkpoint(self) -> None:
        every = self._spec.config.checkpoint_every
        self._save_checkpoint(
            every=every if self._merged is None else min(every, 1),  # without it the adapter starts from zero
            adapter=self._adapter_settings(),
            digest=self._digest,
        )

    def load_version(self, version: int) -> Sequence[str]:
        """Moments start at zero. Returns the labels of the version's newest steps. Raises InvalidRequest
        (absent or damaged) or OSError (an old checkpoint cannot be removed): the weights are unchanged."""
        self._checkpoints.wait_until_copied()
        problem = self._stored.problem(version)
        if problem is not None:
            raise InvalidRequest(f"version {version} is not loaded: {problem}")
        try:
            with self._store.reading(version) as directory:
                labels = self._store.manifest_of(version).step_labels
                self._checkpoints.discard()
                self._load_stored(version, directory, self._learner.steps_done)
        except FileNotFoundError as error:
            raise InvalidRequest(str(error)) from error
        self._labels = labels
        return labels

    def save(self, path: str | None) -> SavedCheckpoint:
        """Write the current weights to a new directory; None: one in the store. Raises InvalidRequest: `path`
        is not absolute, new or empty, or its disk is full."""
        started = time.perf_counter()
        default = self._store.directory / f"checkpoint-{self._learner.steps_done:06d}"
        directory = directory_to_save(path, default, self._check_owner)
        weights = {}
        drafter = self._policy.drafter
        is_apart = drafter is not None and drafter.has_own_checkpoint
        for name, tensor in self._source(None):
            if self._rank == 0 and not (is_apart and name.startswith(DRAFTER)):
                weights[name] = tensor.to("cpu")
        if self._rank == 0:
            self._base.write(directory, self._policy.model, self._spec.config.dtype, weights)
            if drafter is not None and is_apart:
                write_drafter(drafter, directory / DRAFTER_DIRECTORY)
        return SavedCheckpoint(
            path=str(directory.absolute()),
            step=self._learner.steps_done,
            save_s=time.perf_counter() - started,
        )

    def store_status(self) -> StoreStatus:
        result = self._writer.result
        problem = None
        if result is not None and result.problem:
            problem = f"version {result.version} is not in the store: {result.problem}"
        return StoreStatus(stored_version=self._writer.newest, store_problem=problem)

    def flush_version(self, timeout_s: float) -> bool:
        return self._writer.wait(timeout_s)

    def flush(self, timeout_s: float) -> bool:
        began = time.monotonic()
        written = self.flush_version(timeout_s)
        left = max(0.0, timeout_s - (time.monotonic() - began))
        return self._checkpoints.wait(left) and written

    def _source(self, dtype: torch.dtype | None) -> ParameterSource:
        drafter = self._policy.drafter
        return ParameterSource(
            self._policy.model,
            adapter=self._policy.adapter,
            dtype=dtype,
            stored=self._base.names,
            drafter=None if drafter is None else drafter.tensors(),
            frozen=self._frozen,
        )

    def _load_drafter(self, directory: Path) -> None:
        drafter, below = self._policy.drafter, directory / DRAFTER_DIRECTORY
        if drafter is None:
            return
        if not drafter.has_own_checkpoint:
            drafter.load(self._base.read(drafter.tensors().keys(), directory), directory)
        elif below.is_dir():
            drafter.load(read_tensors(below, read_schema(below) or {}), directory)

    def _reference(self) -> TrainedPolicy | BaseOf | None:
        """What the KL penalty compares with: the model."""
        if self._spec.config.loss.kl_coefficient == 0.0:
            return None
        if self._merged is not None and self._base_version == 0:
            return BaseOf(self._policy)
        return self._read(self._base.directory)

    def _directory_of(self, version: int) -> Path:
        return self._store.path_of(version) if version else self._base.directory

    def _adapter_settings(self) -> Mapping[str, Any] | None:
        return None if self._merged is None else adapter_settings(self._merged, self._base_version)

    def _find_base(self, version: int) -> int:
        """From the checkpoint of these weights, if usable; else the version itself."""

        def saved_base() -> int | None:
            manifest = self._store.manifest_of(version)
            for _, meta in self._checkpoints.complete():
                base = (meta.adapter or {}).get("base_version")
                if isinstance(base, int) and meta.is_of(manifest.trainer_step or 0, manifest.digest):
                    return base
            return None

        base, stored = from_rank_0((saved_base() if version else None, list(self._store.list())))
        usable = base == 0 or (base in stored and self._stored.problem(base) is None)
        return base if base is not None and usable else version

    def _resume(self, version: int) -> None:
        manifest = self._store.manifest_of(version)
        step = from_rank_0(self._steps_of(manifest))
        self._labels = manifest.step_labels
        settings = self._adapter_settings()
        found = [each for each in self._checkpoints.complete() if each[1].adapter == settings]
        if self._merged is not None:
            found = [each for each in found if each[1].is_of(step, manifest.digest)]
        difference = resume(self._learner, self._checkpoints, found, step, manifest.digest)
        if self._merged is not None and difference is not None:
            self._load_stored(version, self._store.path_of(version), step)
            difference = f"the adapter starts from zero on it: {difference}"
        self._log_resumed(f"resumes from version {version}", difference)

    def _steps_of(self, manifest: VersionManifest) -> int:
        """A replica that stored the version, or another publisher's, does not know its steps."""
        known = {meta.digest: meta.step for _, meta in self._checkpoints.complete() if meta.digest}
        for version in [each for each in reversed(self._store.list()) if each <= manifest.version]:
            with suppress(OSError, ValueError):
                found = self._store.manifest_of(version)
                step = known.get(found.digest or "") if found.trainer_step is None else found.trainer_step
                if step is not None:
                    return step
        return 0

    def _load_stored(self, version: int, directory: Path, step: int) -> None:
        if isinstance(self._learner.reference, BaseOf):  # the base will no longer be the model
            self._learner.reference = self._read(self._base.directory)
        self._load_drafter(directory)
        self._policy.load_weights(directory)
        self._frozen |= self._base.read(self._frozen, directory)
        self._base_version = version
        self._learner.restart(step, keep_moments=False)

    def _write_files(self, directory: Path, dtype: str | None) -> None:
        self._base.write_files(
            directory, self._policy.model, self._spec.config.dtype if dtype is None else dtype
        )

    def _report(self, result: StoreResult) -> None:
        if result.problem:
            call = retried(
                self._controller, "not_stored", result.version, result.problem, limit_s=STORED_TIMEOUT_S
            )
        else:
            written = (result.version, result.path, result.label)
            call = retried(self._controller, "stored", *written, limit_s=STORED_TIMEOUT_S)
        run_sync(call)
        if self._spec.store_keep is not None:
            self._store.remove_old(self._fleet_id, self._spec.store_keep)


def _missed(found: Found) -> str | None:
    version, committed = found.version, found.committed
    if version == committed:
        return None
    back = f"go back to version {version} (POST /fleet/rollback), or " if version else ""
    return (
        f"the trainer has version {version}, and version {committed} is committed: {found.problem}. It "
        f"neither learns nor publishes until it is told what to do: {back}replace version {committed} (POST "
        f'/train/publish with "after": {committed})'
    )


def adapter_settings(config: LoraConfig, base_version: int) -> dict[str, Any]:
    """Checkpoints with other settings are not continued."""
    modules = None if config.target_modules is None else sorted(config.target_modules)
    return {
        "rank": config.rank,
        "alpha": config.alpha,
        "target_modules": modules,
        "base_version": base_version,
    }


def write_drafter(drafter: "TrainedDrafter", directory: Path) -> None:
    try:
        drafter.write(directory)
    except OSError as error:
        raise InvalidRequest(f"the drafter cannot be written to {directory}: {error}") from error


def directory_to_save(path: str | None, default: Path, check_owner: Callable[[], object]) -> Path:
    """The directory to write to, created if needed; `default`, in the store, may be a rewrite. Raises
    InvalidRequest: the path is relative, holds files or cannot be written, or the store is no longer this
    fleet's."""
    if path is None:
        try:
            check_owner()
        except JournalError as error:
            raise InvalidRequest(str(error)) from error
        default.mkdir(parents=True, exist_ok=True)
        return default
    try:
        directory = Path(path).expanduser()
        if not directory.is_absolute():
            raise InvalidRequest(f"path must be absolute, got {path[:200]!r}")
        directory.mkdir(parents=True, exist_ok=True)
        if next(directory.iterdir(), None) is not None:
            raise InvalidRequest(f"path must be a new or an empty directory, got {path[:200]!r}")
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte; no such user
        raise InvalidRequest(
            f"path must be a directory that can be written, got {path[:200]!r}: {error}"
        ) from error
    return directory
