"""What every rank of a trainer does, whatever it trains: join its group, read a model, learn."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import JsonValue

from deployments.calls.rpc import CallHandle, retried, run_sync
from deployments.host.logs import serve_logger
from deployments.protocol.errors import InvalidRequest
from deployments.protocol.responses import FleetStatus
from deployments.trainer.checkpoint import BaseCheckpoint
from deployments.trainer.spec import TrainerSpec
from deployments.weights.store.hub import downloaded
from trainers.fsdp2 import mesh_of_all_ranks
from trainers.learner import Learner, OutOfMemory
from trainers.policy import Policy
from trainers.settings import LoraConfig, Strategy
from trainers.step_metrics import Metrics, drift
from trainers.trajectory import parse_trajectories
from trainers.trajectory_arrays import from_bytes


def directory_to_save(path: str | None, default: Path) -> Path:
    """The directory, which is there when this returns.

    Args:
        path: absolute; None: `default`, which an earlier call may have written.

    Raises:
        InvalidRequest: it is not absolute, has files in it, or cannot be written.
    """
    if path is None:
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


logger = serve_logger()


class TrainerRank:
    """The part that both kinds of worker have. Every method is called on all ranks alike."""

    _base: BaseCheckpoint
    _policy: Policy
    _learner: Learner

    def __init__(self, spec: TrainerSpec, rank: int, controller: CallHandle) -> None:
        self._spec = spec
        self._rank = rank
        self._controller = controller

    def step(self, trajectories: Sequence[JsonValue] | bytes, published: int | None = None) -> Metrics:
        """One optimizer step.

        Args:
            trajectories: in their JSON form, see `trainers.trajectory`, or as `trainers.trajectory_arrays`.
            published: as in `Learner.step`.

        Raises:
            InvalidRequest: the batch is not valid, or needs more memory than there is: what was expected and
                what was received. Nothing changed.
        """
        sampled = self._spec.config.loss.has_rollouts
        try:
            parsed = parse_trajectories(
                from_bytes(trajectories, sampled=sampled)
                if isinstance(trajectories, bytes)
                else trajectories,
                vocabulary_size=self._policy.vocabulary_size,
                max_length=self._policy.max_length,
                sampled=sampled,
            )
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        try:
            metrics = self._learner.step(parsed, published=published)
        except OutOfMemory as error:
            if self._spec.config.world_size > 1:
                raise  # the other ranks wait for this one in a collective: they are restarted together
            raise InvalidRequest(str(error)) from None
        sentence = drift(metrics)
        if sentence is not None and self._rank == 0:
            logger.warning(sentence)
        return metrics

    def _begin(self, rendezvous_address: tuple[str, int]) -> None:
        """Find the model on this rank's host, seed, and join the other ranks.

        Raises:
            ValueError: the model is no directory, and cannot be downloaded.
        """
        # Before the group, whose other ranks would wait for the download in it.
        self._spec = replace(self._spec, model=str(downloaded(self._spec.model, self._spec.revision)))
        self._base = BaseCheckpoint(Path(self._spec.model))
        torch.manual_seed(self._spec.config.seed)
        if self._spec.config.compute_dtype is not None and self._spec.device == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32, for products that autocast leaves
        # One process needs no group: all collectives are among the ranks of this trainer.
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
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if self._spec.device == "cuda" else "gloo")

    def _read(self, directory: Path, lora: LoraConfig | None = None) -> Policy:
        """A policy, with an adapter if `lora` says so; sharded where there are ranks to share it."""
        config = self._spec.config
        is_sharded = config.strategy == Strategy.FSDP2
        policy = Policy.load(
            directory,
            dtype=config.dtype,
            device="cuda:0" if self._spec.device == "cuda" else "cpu",
            mesh=mesh_of_all_ranks(self._spec.device) if is_sharded else None,
            compute_dtype=config.compute_dtype,
            activation_checkpointing=config.activation_checkpointing,
            compile_layers=config.compile_layers,
            packed=config.packed,
            trust_remote_code=self._spec.trust_remote_code,
        )
        if lora is not None:
            policy.adapt(lora, seed=config.seed)
        return policy

    def _fleet(self) -> FleetStatus:
        return run_sync(retried(lambda: self._controller.fleet.remote(), "fleet"))
