"""One rank of a trainer that trains an adapter.

Every rank holds the whole adapter; rank 0 alone writes and publishes it, and the others send it where rank 0
does not reach every replica. The base is the version that the
fleet had committed when the trainer started. An adapter of another base is not published: it would answer
with weights that it was not trained on.
"""

import hashlib
import time
from pathlib import Path

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from deployments.calls.rpc import CallHandle
from deployments.host.logs import serve_logger
from deployments.protocol.errors import Conflict, InvalidRequest
from deployments.protocol.responses import AdapterReport, SavedCheckpoint
from deployments.trainer.lora.host_copies import host_copies
from deployments.trainer.lora.publisher import AdapterPublisher, adapter_files
from deployments.trainer.lora.resume import State, StateFile, go_on, look, settings
from deployments.trainer.lora.sender import adapter_sender
from deployments.trainer.rank import TrainerRank, directory_to_save
from deployments.trainer.spec import LoadedTrainer, StoreStatus, TrainerSpec, adapter_directory
from deployments.trainer.stored_weights import StoredWeights
from deployments.weights.store.versions import Store
from trainers.learner import Learner
from trainers.lora import Adapter
from trainers.policy import DTYPES, BaseOf
from trainers.settings import LoraConfig

STORE_WAIT_S = 60.0
logger = serve_logger()


class LoraWorker(TrainerRank):
    """It has the calls of `TrainerWorker`, but for those about versions of all weights."""

    def __init__(self, spec: TrainerSpec, rank: int, controller: CallHandle) -> None:
        super().__init__(spec, rank, controller)
        self._store = Store(Path(spec.store_dir))
        directory = self._store.directory.parent / "trainer" / f"lora-{_short(self._lora.name)}"
        self._state_file = StateFile(directory, 0)

    @property
    def _lora(self) -> LoraConfig:
        lora = self._spec.config.published_adapter
        assert lora is not None, "this worker publishes an adapter"
        return lora

    @property
    def _wire_dtype(self) -> torch.dtype | None:
        name = self._spec.config.wire_dtype
        return None if name is None else DTYPES[name]

    @property
    def _adapter(self) -> Adapter:
        assert self._policy.adapter is not None, "this worker trains an adapter"
        return self._policy.adapter

    def load(self, rendezvous_address: tuple[str, int]) -> LoadedTrainer:
        """Join the group, load the base, and go on with the adapter where it was.

        Raises:
            ValueError: the model has no such modules, or what was saved is of an adapter with other settings.
            OSError: the checkpoint cannot be read.
        """
        self._begin(rendezvous_address)
        fleet = self._fleet()
        self._wait_for_base(fleet.committed_version)
        self._base_version = StoredWeights(self._store, self._rank).newest(fleet.fleet_id)
        base = self._store.path_of(self._base_version) if self._base_version else Path(self._spec.model)
        self._policy = self._read(base, self._lora)
        self._check_names()
        reference = BaseOf(self._policy) if self._spec.config.loss.kl_coefficient != 0.0 else None
        self._learner = Learner(self._policy, self._spec.config, reference=reference)
        self._fleet_id = fleet.fleet_id
        self._sender = adapter_sender(self._spec, self._rank, self._controller)
        version, found = 0, None
        if self._rank == 0:
            self._publisher = AdapterPublisher(
                self._lora.name,
                self._controller,
                adapter_directory(self._spec.store_dir),
                fleet_id=fleet.fleet_id,
                dtype=self._wire_dtype,
                sender=self._sender,
            )
            live = self._publisher.newest()
            if live is not None and live.step is None:
                logger.warning(
                    "%s@%d was not published by this trainer, which publishes nothing beside it",
                    self._lora.name,
                    live.version,
                )
            version = 0 if live is None or live.step is None else live.version
            own = settings(self._lora, self._base_version)
            found = look(self._learner, self._state_file, live, own)
            self._say_base(found.state)
        difference = go_on(self._learner, found)
        if self._rank == 0:
            self._say_start(difference)
        return LoadedTrainer(
            version=self._base_version,
            step=self._learner.steps_done,
            parameters=sum(parameter.numel() for parameter in self._policy.parameters()),
            adapter_version=version,
        )

    def publish(self, label: str | None) -> AdapterReport | None:
        """Make the adapter the next version of its name, on all replicas or on none.

        Returns:
            The report on rank 0, None elsewhere.

        Raises:
            SlipstreamError: as `AdapterPublisher.publish`; Conflict: the fleet serves another base.
        """
        if self._rank != 0:
            self._send_as_rank_0_does()
            return None
        try:
            return self._publish(label)
        finally:
            if self._sender is not None:
                self._sender.end()

    def _send_as_rank_0_does(self) -> None:
        """To the replicas that this rank reaches, where rank 0 does not reach all."""
        if self._sender is None:
            return
        step = self._learner.steps_done
        self._sender.send(
            adapter_files(self._adapter, dtype=self._wire_dtype, fleet_id=self._fleet_id, step=step)
        )

    def _publish(self, label: str | None) -> AdapterReport:
        committed = self._fleet().committed_version
        if committed != self._base_version:
            raise Conflict(
                f"the adapter {self._lora.name!r} was trained on version {self._base_version}, and the fleet "
                f"serves version {committed}: the trainer takes that as its base when it is started again",
                {"expected": self._base_version, "version": committed},
            )
        return self._publisher.publish(
            self._adapter,
            step=self._learner.steps_done,
            base_version=self._base_version,
            label=label,
            # A trainer that is lost once the fleet has it goes on from here.
            before_load=self._save_state,
        )

    def save(self, path: str | None) -> SavedCheckpoint | None:
        """Write the adapter as it is now, in peft's format.

        Args:
            path: an absolute path of a new or empty directory; None: one beside the store, named by the step.

        Returns:
            The report on rank 0. None elsewhere: a rank that comes late would find rank 0's files in `path`.

        Raises:
            InvalidRequest: `path` is not such a directory, or its disk is full.
        """
        if self._rank != 0:
            return None
        started, step = time.perf_counter(), self._learner.steps_done
        default = self._store.directory.parent / f"adapter-{_short(self._lora.name)}-{step:06d}"
        directory = directory_to_save(path, default)
        try:
            self._adapter.write(directory)
        except OSError as error:
            raise InvalidRequest(f"the adapter cannot be written to {directory}: {error}") from error
        return SavedCheckpoint(
            path=str(directory.absolute()), step=step, save_s=time.perf_counter() - started
        )

    def store_status(self) -> StoreStatus:
        """This trainer writes no versions of the base."""
        return StoreStatus(stored_version=None, store_problem=None)

    def flush(self, timeout_s: float) -> bool:
        """Nothing is written beside a call."""
        return True

    def _wait_for_base(self, committed: int) -> None:
        """A version is written to the store after its commit. One that never comes is not waited for long:
        `publish` says that the fleet has another base."""
        until = time.monotonic() + STORE_WAIT_S
        while committed not in (0, *self._store.list()) and time.monotonic() < until:
            time.sleep(0.5)

    def _check_names(self) -> None:
        """Raises ValueError if the checkpoint has another name for an adapted module: engines have its."""
        names = self._base.names
        lost = [module for module in self._adapter.modules() if f"{module}.weight" not in names]
        if names and lost:
            raise ValueError(
                f"LoRA is not possible here: {self._base.directory} has no {lost[0]}.weight ({len(lost)} "
                "modules have other names in the checkpoint than in the trainer's model); leave them out of "
                "'trainer.lora.target_modules'"
            )

    def _say_start(self, difference: str | None) -> None:
        name, step = self._lora.name, self._learner.steps_done
        if difference is None:
            logger.info("the trainer trains the adapter %r, from step %d", name, step)
        else:
            logger.warning("the trainer trains the adapter %r, from step %d; %s", name, step, difference)

    def _say_base(self, state: State | None) -> None:
        if state is None or state["lora"]["base_version"] == self._base_version:
            return
        logger.warning(
            "the adapter %r was trained on version %d, and goes on with version %d as its base",
            self._lora.name,
            state["lora"]["base_version"],
            self._base_version,
        )

    def _save_state(self) -> None:
        """If that fails, the former state stays and training goes on."""
        step = self._learner.steps_done
        if step in (0, self._state_file.step):
            return
        state = self._learner.state_dict(wire_dtype=self._spec.config.wire_dtype)
        leaves, tree = tree_flatten({**state, "lora": settings(self._lora, self._base_version)})
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        copies = iter(host_copies(tensors))  # `torch.save` would copy one after the other
        leaves = [next(copies) if isinstance(each, torch.Tensor) else each for each in leaves]
        try:
            self._state_file.write(tree_unflatten(leaves, tree), step)
        except OSError as error:
            logger.warning(
                "the state of the adapter %r at step %d is not saved, the former one stays: %s",
                self._lora.name,
                step,
                error,
            )


def _short(name: str) -> str:
    """A part of a file's name for the name of an adapter, which may have any characters."""
    return hashlib.sha256(name.encode()).hexdigest()[:12]
