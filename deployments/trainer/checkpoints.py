"""Checkpoints of a trainer: AdamW's moments and master weights, by torch.distributed.checkpoint.

    trainer/checkpoints/step-000010/            complete: its files are on the disk, then it got this name
        checkpoint.json                         step, fleet, the dtype that weights were published in
        .metadata  __0_0.distcp  __1_0.distcp   one file of each rank
    trainer/checkpoints/.step-000020-*.partial  being written; removed by the next trainer that starts

A save copies the tensors into host memory beside whatever follows; a step waits until that is done, for the
copies are of the weights before it. Then a thread writes them, whatever the trainer does meanwhile. A save
that comes while the former one is being written is left out, on all ranks, and made up for after a later
step: a slow disk costs checkpoints and never time or memory.

Each tensor has its parameter's name and place in the whole, so any number of ranks can read what others have
written. All ranks must share the directory.
"""

import contextlib
import json
import shutil
import threading
import uuid
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from deployments.host.durable_files import rename, replacing
from deployments.host.logs import serve_logger
from trainers.learner import Learner
from trainers.learner_state import named_moments, named_weights
from trainers.policy import DTYPES
from trainers.settings import Dtype

ABOUT = "checkpoint.json"
COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # of the thread that writes: a rank's disk may be slow
ERRORS = (Exception, CheckpointException)  # torch's is no Exception: it has those of all ranks
Tensors = Mapping[str, Mapping[str, torch.Tensor]]  # by what they are (AdamW's names, weights), then by name
Layout = Mapping[str, Sequence[str]]
logger = serve_logger()
# One process needs no process group, and torch says so at each save and load.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a checkpoint says of itself."""

    step: int
    fleet_id: str | None
    wire_dtype: Dtype | None
    adapter: Mapping[str, Any] | None = None  # what it is and its base, see `lora.merged`; None: no adapter
    digest: str | None = None  # of the version with its weights; None: the replicas gave none

    def is_of(self, step: int, digest: str | None) -> bool:
        """Whether it was made of the weights of a version with this step and this digest. Steps are not
        enough: a trainer that went on from an older version comes to each of them again."""
        return self.step == step and self.digest in (None, digest)


class Checkpoints:
    """The checkpoints below a directory, which one trainer at a time writes. Every rank makes every call.

    Args:
        directory: shared by the ranks.
        keep: complete ones that stay, the newest.

    Attributes:
        step: of the newest that this process has begun to write, or has resumed from exactly; None: of none.
    """

    def __init__(self, directory: Path, *, rank: int, keep: int) -> None:
        self.directory = directory
        self.step: int | None = None
        self._rank = rank
        self._keep = keep
        self._distributed = dist.is_initialized() and dist.get_world_size() > 1
        # The thread's collectives must not mix with those of the rank's other calls.
        self.group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if self._distributed else None
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-copy")
        self._pinned: tuple[Layout, BlockingAsyncStager] | None = None  # kept: pinning memory takes seconds
        self._staged: Future[Any] | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None
        self._lock = threading.Lock()
        self._void = object()  # replaced when what is being written must not count any more
        if rank == 0:
            for leftover in directory.glob(".step-*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def complete(self, fleet_id: str | None) -> list[tuple[Path, About]]:
        """Those of this fleet, the newest first."""
        found = []
        for path in self.directory.glob("step-*"):
            with contextlib.suppress(OSError, ValueError, TypeError):  # it is being removed, or damaged
                about = About(**json.loads((path / ABOUT).read_text(encoding="utf-8")))
                if about.fleet_id == fleet_id:
                    found.append((path, about))
        return sorted(found, key=lambda each: each[1].step, reverse=True)

    def save(
        self,
        learner: Learner,
        *,
        wire_dtype: Dtype | None,
        fleet_id: str | None,
        adapter: Mapping[str, Any] | None = None,
        digest: str | None = None,
        due: bool = True,
    ) -> bool:
        """Begin to write a checkpoint of the learner as it is; False if there is nothing to begin.

        The learner may change after `wait_until_copied`.

        Args:
            digest: of the version that was published with these weights; rank 0 says it.
            due: whether there shall be one; rank 0 says it, for the ranks may differ after a fault of one.
        """
        agreed = self._agree({"due": due, "busy": not self._is_idle(), "name": uuid.uuid4().hex[:8]})
        if not agreed[0]["due"]:
            return False
        if any(each["busy"] for each in agreed):
            if self._rank == 0:
                logger.info(
                    "no checkpoint of step %d: the former one is still being written", learner.steps_done
                )
            return False
        about = About(
            step=learner.steps_done, fleet_id=fleet_id, wire_dtype=wire_dtype, adapter=adapter, digest=digest
        )
        dtype = None if wire_dtype is None else DTYPES[wire_dtype]
        tensors = named_moments(learner.policy, learner.optimizer.state) | {
            "weights": named_weights(learner.policy, dtype)
        }
        if _is_on_gpu(tensors):
            torch.cuda.synchronize()  # the copies are on a stream that does not wait for the step's
        self._staged = self._copier.submit(self._copy, tensors)
        partial = self.directory / f".step-{about.step:06d}-{agreed[0]['name']}.partial"
        self.step = about.step
        self._written = self._writer.submit(self._write, self._staged, partial, about, self._void)
        return True

    def wait_until_copied(self) -> None:
        """Until what is being saved does not depend on the learner any more."""
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.exception()  # which the writer reports

    def wait(self, timeout_s: float) -> bool:
        """Until nothing is being written; False if that takes longer than `timeout_s`."""
        return self._written is None or not wait_for([self._written], timeout_s).not_done

    def discard(self) -> None:
        """Remove all of them; what is being written does not become one.

        Raises:
            OSError: one cannot be removed.
        """
        with self._lock:
            self._void = object()
            self.step = None
            if self._rank == 0:
                for path in self.directory.glob("step-*"):
                    self._remove(path)

    def _is_idle(self) -> bool:
        return self._written is None or self._written.done()

    def _copy(self, tensors: Tensors) -> Any:
        """In the thread that copies: the same tensors in host memory, which is pinned for those of a GPU."""
        if not _is_on_gpu(tensors):
            return BlockingAsyncStager().stage(tensors)
        # Not torch's DefaultStager: up to torch 2.11 it can be used once, for it closes itself.
        layout = {part: sorted(named) for part, named in tensors.items()}
        if self._pinned is None or self._pinned[0] != layout:
            self._pinned = None  # first: both may be more than the host has
            self._pinned = layout, BlockingAsyncStager(cache_staged_state_dict=True)
        device = next(
            tensor.device for named in tensors.values() for tensor in named.values() if tensor.is_cuda
        )
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                return self._pinned[1].stage(tensors)
        except BaseException:  # whatever it was, it is raised again
            self._pinned = None
            raise

    def _write(self, staged: Future[Any], partial: Path, about: About, void: object) -> None:
        """In the thread. If it fails, the former checkpoints stay and training goes on."""
        try:
            dcp.save(
                staged.result(),
                storage_writer=dcp.FileSystemWriter(partial),
                process_group=self.group,
                no_dist=not self._distributed,
            )
            if self._rank == 0:
                with replacing(partial / ABOUT) as file:
                    file.write_text(json.dumps(asdict(about)), encoding="utf-8")
                self._finish(partial, about, void)
        except ERRORS as error:  # of any class; a full disk must not end training
            self.step = None  # the next save is due at once
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)  # it may be what fills the disk
                logger.warning(
                    "the trainer's checkpoint of step %d is not saved, the former ones stay: %s",
                    about.step,
                    one_line(error),
                )

    def _finish(self, partial: Path, about: About, void: object) -> None:
        final = self.directory / f"step-{about.step:06d}"
        with self._lock:
            if self._void is not void:
                shutil.rmtree(partial, ignore_errors=True)
                return
            if final.exists():  # of a run that had come as far before
                self._remove(final)
            rename(partial, final)
            try:
                self._remove_old(about)
            except OSError as error:
                logger.warning("an old checkpoint of the trainer cannot be removed: %s", one_line(error))

    def _remove_old(self, newest: About) -> None:
        """Those of later steps too: the trainer went back, so they are of weights that it never had."""
        complete = self.complete(newest.fleet_id)
        later = [path for path, about in complete if about.step > newest.step]
        earlier = [path for path, about in complete if about.step <= newest.step]
        for path in later + earlier[self._keep :]:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        """Its name first: half a checkpoint never has it."""
        aside = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}.removed")
        path.rename(aside)
        shutil.rmtree(aside)

    def _agree(self, own: dict[str, Any]) -> Sequence[dict[str, Any]]:
        if not self._distributed:
            return [own]
        ranks = [own] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        return ranks


def one_line(error: BaseException) -> str:
    """What an error of torch.distributed.checkpoint says, without the traces of all ranks."""
    causes = getattr(error, "failures", None)  # by rank: an exception and its trace
    if causes:
        error = next(iter(causes.values()))[0]
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_on_gpu(tensors: Tensors) -> bool:
    return any(tensor.is_cuda for named in tensors.values() for tensor in named.values())
