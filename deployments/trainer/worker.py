"""One rank of the trainer: the policy, its optimizer and its part of every publish."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import torch
from ray.serve.handle import DeploymentHandle

from deployments.errors import InvalidRequest
from deployments.logs import serve_logger
from deployments.trainer.publisher import Publisher, free_port, own_address
from deployments.trainer.spec import Strategy, TrainerSpec
from deployments.weights.store.version_writer import STATE_FILE, CommittedVersion, VersionWriter
from deployments.weights.store.versions import Store
from trainers.learner import Learner, Metrics
from trainers.policy import DTYPES, Policy
from trainers.sources import ParameterSource
from trainers.trajectory import parse_trajectories

STORED_TIMEOUT_S = 60.0
logger = serve_logger()


class TrainerWorker:
    """A Ray actor. Every method but `meeting_point` and `process_id` is called on all ranks alike."""

    def __init__(self, spec: TrainerSpec, rank: int, controller: DeploymentHandle) -> None:
        self._spec = spec
        self._rank = rank
        self._controller = controller
        self._store = Store(Path(spec.store_dir), keep=spec.keep)

    def meeting_point(self) -> tuple[str, int]:
        """Where the ranks' process group can meet: this rank's host, and a port that is free there."""
        return own_address(), free_port()

    @ray.method(concurrency_group="control")
    def process_id(self) -> int:
        return os.getpid()

    def load(self, meeting_point: tuple[str, int]) -> dict[str, Any]:
        """Join the group, load the newest stored version or the model, and be ready."""
        spec = self._spec
        torch.manual_seed(spec.seed)
        # One process needs no group: collectives are only ever inside the workers of a trainer.
        if spec.strategy == Strategy.FSDP2:
            self._join(meeting_point)
        version = max(self._store.list(), default=0)
        self._policy = self._read(self._store.path_of(version) if version else Path(spec.model))
        reference = self._read(Path(spec.model)) if spec.learner.loss.kl_coefficient != 0.0 else None
        self._learner = Learner(self._policy, spec.learner, reference=reference)
        if version:
            self._resume(version)
        source = ParameterSource(
            self._policy.model, dtype=None if spec.wire_dtype is None else DTYPES[spec.wire_dtype]
        )
        self._publisher = Publisher(spec, self._rank, source, self._controller)
        self._writer = VersionWriter(self._store, write_files=self._write_files, stored=self._tell_stored)
        return {"version": version, "step": self._learner.steps_done, "parameters": self._parameters()}

    def step(self, body: Mapping[str, Any]) -> Metrics:
        """Raises InvalidRequest: what was expected of the batch, and what came."""
        unknown = sorted(set(body) - {"trajectories"})
        if unknown:
            raise InvalidRequest(f"a step takes 'trajectories' and nothing else, got {unknown}")
        try:
            trajectories = parse_trajectories(
                body.get("trajectories"),
                vocabulary_size=self._policy.vocabulary_size,
                max_length=self._policy.max_length,
            )
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        return self._learner.step(trajectories)

    def publish(self, label: str | None) -> dict[str, Any]:
        """Move the fleet to this policy; the report as JSON types, on rank 0 (empty elsewhere)."""
        report = self._publisher.publish(label)
        if report is None:
            return {}
        weights = self._publisher.source.take_copy()
        self._writer.put(
            CommittedVersion(
                version=report.version,
                label=report.label,
                weights=weights,
                trainer_step=self._learner.steps_done,
            )
        )
        return asdict(report)

    def keep_optimizer_state(self) -> None:
        """Write the optimizer's state for a restart; called between steps, now and then."""
        every = self._spec.optimizer_state_every
        if every == 0 or self._learner.steps_done % every != 0:
            return
        target = self._state_file()
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_suffix(".partial")
        torch.save(self._learner.state_dict(), aside)
        aside.replace(target)

    def load_version(self, version: int) -> None:
        """Take the weights of a stored version back; the optimizer forgets what led away from it."""
        try:
            with self._store.reading(version) as directory:
                self._policy.load_weights(directory)
        except FileNotFoundError as error:
            raise InvalidRequest(str(error)) from error
        self._learner.restart(self._learner.steps_done, keep_moments=False)

    def save(self, path: str | None) -> dict[str, Any]:
        """An ordinary checkpoint of the weights as they are now; by default beside the store."""
        default = self._store.directory.parent / f"checkpoint-{self._learner.steps_done:06d}"
        directory = default if path is None else Path(path).expanduser()
        started = time.perf_counter()
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(
                f"path must be a directory that can be written, got {path}: {error}"
            ) from error
        weights = {}
        for name, tensor in ParameterSource(self._policy.model):  # every rank gathers, one keeps
            if self._rank == 0:
                weights[name] = tensor.to("cpu")
        if self._rank == 0:
            from safetensors.torch import save_file

            self._write_files(directory, wire=False)
            save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return {
            "path": str(directory.absolute()),
            "step": self._learner.steps_done,
            "save_s": time.perf_counter() - started,
        }

    @ray.method(concurrency_group="control")
    def store_status(self) -> dict[str, Any]:
        return {"stored_version": self._writer.newest, "store_problem": self._writer.problem}

    def flush(self, timeout_s: float) -> bool:
        """Wait for the store; for an orderly end."""
        return self._writer.wait(timeout_s)

    def _join(self, meeting_point: tuple[str, int]) -> None:
        host, port = meeting_point
        os.environ |= {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "RANK": str(self._rank),
            "WORLD_SIZE": str(self._spec.world_size),
            "LOCAL_RANK": "0",  # Ray shows each actor only its own devices
        }
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if self._spec.device == "cuda" else "gloo")

    def _read(self, directory: Path) -> Policy:
        if self._spec.strategy == Strategy.SINGLE:
            return Policy.load(directory, dtype=self._spec.dtype, device=self._device())
        from trainers.fsdp2 import shard_policy

        policy = Policy.load(directory, dtype=self._spec.dtype)
        shard_policy(policy, device=self._device())
        return policy

    def _device(self) -> str:
        return "cuda:0" if self._spec.device == "cuda" else "cpu"

    def _parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._policy.model.parameters())

    def _resume(self, version: int) -> None:
        manifest = json.loads((self._store.path_of(version) / "manifest.json").read_text())
        step = int(manifest.get("trainer_step", 0))  # an outside publisher's version has none
        try:
            state = torch.load(self._state_file(), weights_only=True)
            # Moments that are a few steps older than the weights are better than none.
            self._learner.load_state_dict(state)
        except FileNotFoundError:
            pass
        self._learner.restart(step, keep_moments=True)
        logger.info("trainer rank %d resumes from version %d, step %d", self._rank, version, step)

    def _state_file(self) -> Path:
        return self._store.directory.parent / "trainer" / STATE_FILE.format(rank=self._rank)

    def _write_files(self, directory: Path, wire: bool = True) -> None:
        from copy import deepcopy

        model = self._policy.model
        config = deepcopy(model.config)
        config.dtype = (
            self._spec.wire_dtype if wire and self._spec.wire_dtype is not None else self._spec.dtype
        )
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.save_pretrained(directory)
        self._policy.copy_tokenizer(directory)

    def _tell_stored(self, version: int, path: str, label: str | None) -> None:
        self._controller.stored.remote(version, path, label).result(timeout_s=STORED_TIMEOUT_S)
