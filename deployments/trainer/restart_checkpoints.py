"""Checkpoints from which a restarted trainer continues, by torch.distributed.checkpoint (DCP).

    trainer/checkpoints/step-000010/            complete: renamed once its files are on disk
        checkpoint.json                         `CheckpointMeta`
        .metadata  __0_0.distcp  __1_0.distcp   one file per rank
    trainer/checkpoints/.step-000020-*.partial  being written; removed when the next trainer starts

They hold AdamW's moments and master weights; the weights themselves are versions. A save copies the tensors
to host memory, for which the next step waits; a thread writes them. Meanwhile further saves are skipped: a
slow disk costs checkpoints, not time or memory.
"""

import contextlib
import json
import shutil
import threading
import uuid
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import TypeAdapter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from deployments.host.durable_files import flushing, rename, replacing
from deployments.host.logs import serve_logger
from deployments.weights.store.versions import DirectoryLock
from deployments.weights.transports.weight_sender import gather_from_ranks
from trainers.learner import Learner
from trainers.learner_state import (
    STEPS,
    NamedMoments,
    empty_moments,
    local,
    master_weights,
    named_moments,
    restore_weights,
    round_to_model,
)
from trainers.settings import Dtype
from trainers.sources import DRAFTERS
from trainers.trained_policy import DTYPES

META = "checkpoint.json"
WEIGHTS = "weights"
COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # a disk may be slow
ERRORS = (Exception, CheckpointException)  # CheckpointException is a BaseException
Tensors = Mapping[str, Mapping[str, torch.Tensor]]  # moment (or "weights") -> parameter -> tensor
Layout = Mapping[str, Sequence[str]]
logger = serve_logger()
# A single process needs no process group; torch warns at each save and load.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta:
    step: int
    wire_dtype: Dtype | None
    adapter: Mapping[str, Any] | None = None  # None: all weights are trained
    digest: str | None = None  # None: unknown

    def is_of(self, step: int, digest: str | None) -> bool:
        """A step after a rollback may have the same number and other weights."""
        return self.step == step and self.digest in (None, digest)


_METAS = TypeAdapter(CheckpointMeta)
Complete = tuple[Path, CheckpointMeta]


class RestartCheckpoints:
    """Checkpoints in a directory that the ranks share. Every rank makes every call. `step`: the newest that
    this process began to write or resumed from exactly."""

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        keep: int,
        check_owner: Callable[[], object] = lambda: None,
    ) -> None:
        self.directory = directory
        self.step: int | None = None
        self._rank = rank
        self._keep = keep
        self._check_owner = check_owner
        distributed = dist.is_initialized() and dist.get_world_size() > 1
        # Must not be mixed with collectives of the rank's other calls.
        self.group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if distributed else None
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-copy")
        self._pinned: tuple[Layout, BlockingAsyncStager] | None = None  # kept: pinning memory takes seconds
        self._staged: Future[Any] | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None
        self._lock = threading.Lock()
        self._generation = object()  # `discard` replaces it, which voids the write in progress
        if rank == 0:
            for leftover in directory.glob(".step-*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def complete(self) -> list[Complete]:
        found = []
        for path in self.directory.glob("step-*"):
            with contextlib.suppress(OSError, ValueError):  # being removed, or damaged
                found.append((path, _METAS.validate_json((path / META).read_bytes())))
        return sorted(found, key=lambda each: each[1].step, reverse=True)

    def save(
        self,
        learner: Learner,
        *,
        wire_dtype: Dtype | None,
        adapter: Mapping[str, Any] | None = None,
        digest: str | None = None,
        due: bool = True,
    ) -> bool:
        """Begin to write the learner's state; False if none is due or one is being written. The learner may
        change after `wait_until_copied`. If ranks differ in `due`, rank 0's counts."""
        agreed = gather_from_ranks({"due": due, "busy": not self.wait(0), "name": uuid.uuid4().hex[:8]})
        pins = self._pinned is None and torch.cuda.is_initialized()
        if not agreed[0]["due"] and not pins:
            return False
        dtype = None if wire_dtype is None else DTYPES[wire_dtype]
        tensors = named_moments(learner.policy, learner.optimizer.state) | {
            WEIGHTS: master_weights(learner.policy, dtype)
        }
        if not agreed[0]["due"]:
            if _is_on_gpu(tensors):
                self._copier.submit(self._copy, tensors)  # pins the memory before a step waits
            return False
        step = learner.steps_done
        if any(each["busy"] for each in agreed):
            if self._rank == 0:
                logger.info("no checkpoint of step %d: the previous one is still being written", step)
            return False
        meta = CheckpointMeta(step=step, wire_dtype=wire_dtype, adapter=adapter, digest=digest)
        if _is_on_gpu(tensors):
            torch.cuda.synchronize()  # the copies' stream does not wait for the step's
        self._staged = self._copier.submit(self._copy, tensors)
        partial = self.directory / f".step-{step:06d}-{agreed[0]['name']}.partial"
        self.step = step
        self._written = self._writer.submit(self._write, self._staged, partial, meta, self._generation)
        return True

    def wait_until_copied(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.exception()

    def wait(self, timeout_s: float) -> bool:
        return self._written is None or not wait_for([self._written], timeout_s).not_done

    def discard(self) -> None:
        """Remove all checkpoints, and void the one being written. Raises OSError."""
        with self._lock:
            self._generation = object()
            self.step = None
            if self._rank == 0:
                self._check_owner()
                for path in self.directory.glob("step-*"):
                    self._remove(path)

    def _copy(self, tensors: Tensors) -> Any:
        """Copies in host memory, pinned if they come from a GPU."""
        if not _is_on_gpu(tensors):
            return BlockingAsyncStager().stage(tensors)
        # Not torch's DefaultStager: up to torch 2.11 it closes itself after one use.
        layout = {part: sorted(named) for part, named in tensors.items()}
        if self._pinned is None or self._pinned[0] != layout:
            self._pinned = None  # first: both may exceed the host's memory
            self._pinned = layout, BlockingAsyncStager(cache_staged_state_dict=True)
        device = next(
            tensor.device for named in tensors.values() for tensor in named.values() if tensor.is_cuda
        )
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                return self._pinned[1].stage(tensors)
        except BaseException:  # re-raised; the cached memory may be incomplete
            self._pinned = None
            raise

    def _write(self, staged: Future[Any], partial: Path, meta: CheckpointMeta, generation: object) -> None:
        """On failure earlier checkpoints stay and training continues."""
        try:
            partial.mkdir(parents=True, exist_ok=True)  # each rank's
            with closing(DirectoryLock(partial)):  # `Store.being_written` sees it
                tensors = staged.result()
                with flushing(partial):
                    dcp.save(
                        tensors,
                        storage_writer=dcp.FileSystemWriter(partial),
                        process_group=self.group,
                        no_dist=self.group is None,
                    )
                if self._rank == 0:
                    with replacing(partial / META) as file:
                        file.write_text(json.dumps(asdict(meta)), encoding="utf-8")
                    self._finish(partial, meta, generation)
        except ERRORS as error:  # a full disk must not end training
            self.step = None  # the next save is due at once
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                logger.warning(
                    "failed to save the trainer's checkpoint of step %d, the previous ones stay: %s",
                    meta.step,
                    one_line(error),
                )

    def _finish(self, partial: Path, meta: CheckpointMeta, generation: object) -> None:
        final = self.directory / f"step-{meta.step:06d}"
        with self._lock:
            if self._generation is not generation:
                shutil.rmtree(partial, ignore_errors=True)
                return
            self._check_owner()
            if final.exists():
                self._remove(final)
            rename(partial, final)
            try:
                self._remove_old(meta)
            except OSError as error:
                logger.warning("failed to remove an old checkpoint of the trainer: %s", one_line(error))

    def _remove_old(self, newest: CheckpointMeta) -> None:
        """Later steps too: after a rollback this run never had them."""
        complete = self.complete()
        later = [path for path, meta in complete if meta.step > newest.step]
        earlier = [path for path, meta in complete if meta.step <= newest.step]
        for path in later + earlier[self._keep :]:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        aside = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}.removed")
        path.rename(aside)  # first: a half-removed checkpoint must not look complete
        shutil.rmtree(aside)


def resume(
    learner: Learner,
    checkpoints: RestartCheckpoints,
    candidates: Sequence[Complete],
    step: int,
    digest: str | None = None,
) -> str | None:
    """Continue from the learner's weights (`step`, `digest`) with the nearest usable checkpoint: one of these
    weights restores the learner exactly, another its moments; without any, moments start at zero. Returns the
    difference, for the log."""
    problems = []
    for path, meta in sorted(candidates, key=lambda each: (abs(each[1].step - step), each[1].step)):
        problem = restore(learner, checkpoints, path, meta, exact=meta.is_of(step, digest))
        if problem in (None, OTHER_WEIGHTS):
            learner.restart(step, keep_moments=True)
            checkpoints.step = meta.step if problem is None else None  # else the next one is due
            return problem and f"weights as stored, moments of step {meta.step}"
        problems.append(problem)
    learner.restart(step, keep_moments=False)
    reason = "; ".join(map(str, problems)) or f"there is no checkpoint in {checkpoints.directory}"
    return f"moments start at zero: {reason}"


OTHER_WEIGHTS = "other weights"


def restore(
    learner: Learner, checkpoints: RestartCheckpoints, path: Path, meta: CheckpointMeta, *, exact: bool
) -> str | None:
    """Restore a checkpoint on all ranks or on none. Returns None if it has weights and moments (`exact`
    only), `OTHER_WEIGHTS` for moments alone, else why it is unusable."""
    target = _look(learner, path)
    agreed = gather_from_ranks(target if isinstance(target, str) else None)
    if (problem := next((each for each in agreed if each is not None), None)) is not None:
        return problem
    assert not isinstance(target, str)
    weights: dict[str, torch.Tensor] = {}
    is_adapter = learner.policy.adapter is not None
    dtype = None if meta.wire_dtype is None else DTYPES[meta.wire_dtype]
    if exact and (is_adapter or dtype is not None):
        rounded = master_weights(learner.policy, dtype)
        if not any(name.startswith(DRAFTERS) for name in target.weights):  # the drafter is new
            rounded = {name: tensor for name, tensor in rounded.items() if not name.startswith(DRAFTERS)}
        exact = rounded.keys() == target.weights
        weights = {name: torch.empty_like(tensor) for name, tensor in rounded.items()} if exact else {}
    try:
        dcp.load(
            target.moments | {WEIGHTS: weights},
            storage_reader=dcp.FileSystemReader(path),
            process_group=checkpoints.group,
            no_dist=checkpoints.group is None,
        )
    except ERRORS as error:  # raised on all ranks alike
        return f"{path} cannot be used: {one_line(error)}"
    plain = {name: local(tensor) for name, tensor in weights.items()}
    if plain and not is_adapter:
        assert dtype is not None
        exact = round_to_model(learner.policy, plain, dtype)
    learner.optimizer.state.clear()
    learner.optimizer.state.update(target.state)
    if not all(gather_from_ranks(exact)):
        return OTHER_WEIGHTS
    restore_weights(learner.policy, plain)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """`moments` are views of `state`."""

    weights: Collection[str]
    state: dict[torch.Tensor, dict[str, torch.Tensor]]
    moments: NamedMoments


def _look(learner: Learner, path: Path) -> _Target | str:
    try:
        metadata: Metadata = dcp.FileSystemReader(path).read_metadata()
        stored = {
            key: list(each.size)
            for key, each in metadata.state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }
        if learner.policy.drafter is None:
            stored = {
                key: shape
                for key, shape in stored.items()
                if not any(f".{prefix}" in key for prefix in DRAFTERS)
            }
        weights = {key.removeprefix(f"{WEIGHTS}.") for key in stored if key.startswith(f"{WEIGHTS}.")}
        stored = {key: shape for key, shape in stored.items() if not key.startswith(f"{WEIGHTS}.")}
        with_moments = {key.removeprefix(f"{STEPS}.") for key in stored}
        state = empty_moments(learner.policy, with_moments)
        moments = named_moments(learner.policy, state)
        _check(stored, moments)
        return _Target(weights=weights, state=state, moments=moments)
    except Exception as error:  # a damaged file raises anything; training continues without it
        return f"{path} cannot be used: {one_line(error)}"


def _check(stored: Mapping[str, Sequence[int]], moments: NamedMoments) -> None:
    expected = {
        f"{kind}.{name}": list(tensor.shape)
        for kind, each in moments.items()
        for name, tensor in each.items()
    }
    for key in sorted(stored.keys() | expected.keys()):
        if stored.get(key) != expected.get(key):
            kind, _, name = key.partition(".")
            wanted, got = (f"shape {each[key]}" if key in each else "nothing" for each in (expected, stored))
            raise ValueError(f"{kind} of {name!r}: expected {wanted}, got {got}")


def one_line(error: BaseException) -> str:
    causes = getattr(error, "failures", None)  # rank -> (exception, trace)
    if causes:
        error = next(iter(causes.values()))[0]
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_on_gpu(tensors: Tensors) -> bool:
    return any(tensor.is_cuda for named in tensors.values() for tensor in named.values())
