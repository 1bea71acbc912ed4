"""The replica's half of every transport: receive while generating, check, swap between two steps.

    start_weight_update     vLLM's: an update begins
    update_weights          vLLM's: returns at once; the staging thread receives one payload
    progress / verify       the replica's, through the worker extension
    finish_weight_update    vLLM's: the swap, inside a pause of the scheduler
    drop                    the replica's: discards the update

All that may wait for a peer runs on the staging thread.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch
from torch._C import set_num_threads  # vLLM's CPU worker replaces torch's own name for it
from vllm.config import ModelConfig, VllmConfig, WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from deployments.protocol.errors import TransferFailed
from deployments.protocol.poll import Check, FilePart, Outcome
from deployments.weights.staging.base import Staging
from deployments.weights.staging.drafted_model import PolicyAndDrafter, with_drafter
from deployments.weights.staging.staged_update import StagedUpdate, StagingState
from deployments.weights.store.file_read import FileRead
from deployments.weights.store.hub import cached, model_files, schema_of, write_model_files
from deployments.weights.store.version_writer import RetainedVersions, VersionWriter
from deployments.weights.store.versions import DRAFTER, mtp_names
from deployments.weights.wire.checkpoint_schema import Schema, join_reasons, mismatches, missing
from deployments.weights.wire.chunk_layout import Chunk, ReceivedChunk
from deployments.weights.wire.digest import inspect

Init = TypeVar("Init", bound=WeightTransferInitInfo)
Update = TypeVar("Update", bound=WeightTransferUpdateInfo)
Chunks = Callable[[], Iterator[ReceivedChunk]]

VERIFY_S = 120.0  # loads the last layers, reads all digests back
DROP_S = 15.0  # the engine does not decode meanwhile
_POLL_S = 0.0001

logger = init_logger(__name__)


class StagedWeightTransferEngine(WeightTransferEngine[Init, Update], Generic[Init, Update]):
    """Base of the transports' receivers. Called on the engine's thread."""

    supports_draft_weight_update = False
    one_payload = True  # a version is one payload; False: one per chunk
    share = 1.0  # fraction of the device's time

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        # After a catch-up, `model_config.model` is a stored version.
        started_from = vllm_config.additional_config.get("checkpoint", vllm_config.model_config.model)
        loading = vllm_config.load_config
        loaded, checkpoint = (
            cached(model, vllm_config.model_config.revision, loading.download_dir)
            for model in (vllm_config.model_config.model, started_from)
        )
        self.checkpoint = str(checkpoint)
        self.updated = with_drafter(vllm_config, model)
        self.staging = make_staging(vllm_config, self.device, self.updated)
        self.version_writer = VersionWriter(write_files=partial(write_model_files, model_files(loaded)))
        # After a catch-up the hub's files may be absent; the stored version has the same schema.
        source = checkpoint if checkpoint.is_dir() else Path(vllm_config.model_config.model)
        self.schema = schema_of(source, loading.load_format, of_hub=self.checkpoint != started_from)
        self._drafter: Schema = {}  # schema of a drafter with a checkpoint of its own
        self._mtp: Set[str] = frozenset()
        if isinstance(self.updated, PolicyAndDrafter) and self.updated.own_checkpoint:
            self._add_drafter(vllm_config.speculative_config.draft_model_config)
        elif self.schema is not None:
            self._mtp = mtp_names(self.schema, vllm_config.model_config.get_total_num_hidden_layers())
        self.retained = RetainedVersions(self._mtp, source)
        self._matching: WeakSet[Chunk] = WeakSet()  # chunks whose tensors are the model's
        self._update: StagedUpdate | None = None
        self._reading: FileRead | None = None
        self._reported = StagedUpdate()  # also after it was dropped
        self._submitted: Future[None] = Future()
        self._thread = StagingThread(self.device)
        self._stream = self._thread.stream
        self._throttle = Throttle()

    def _add_drafter(self, config: ModelConfig) -> None:
        loading = self.vllm_config.load_config
        directory = cached(config.model, config.revision, loading.download_dir)
        drafter = schema_of(directory, loading.load_format, of_hub=str(directory) != config.model)
        if drafter is None:
            self.schema = None
        elif self.schema is not None:
            self._drafter = {DRAFTER + name: spec for name, spec in drafter.items()}
            self.schema = {**self.schema, **self._drafter}

    @property
    def worker_index(self) -> int:
        parallel = self.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def parse_init_info(self, init_dict: dict[str, Any]) -> Init:
        try:
            return self.init_info_cls(**init_dict)
        except TypeError as error:
            raise ValueError(
                f"expected a publisher over the fleet's 'weights.transport', got another's fields: {error}"
            ) from error

    @abstractmethod
    def connect(self, init_info: Init) -> None:
        """Join the transfer group, on the staging thread. Raises TransferFailed if a peer does not."""

    @abstractmethod
    def receive(self, update_info: Update) -> Iterator[ReceivedChunk]:
        """The chunks of one payload, on the staging thread. Raises TransferFailed (a peer is gone or silent)
        or ValueError (wrong payload)."""

    def init_transfer_engine(self, init_info: Init) -> None:
        self._begin()
        self._submit(self._connect, init_info)

    def _connect(self, update: StagedUpdate, init_info: Init) -> None:
        self.staging.release()
        self.connect(init_info)

    def receive_weights(self, update_info: Update) -> None:
        raise AssertionError("payloads are staged by update_weights, never loaded directly")

    def start_weight_update(self) -> None:
        self._begin()
        self.staging.begin()

    def _begin(self) -> None:
        self._update = self._reported = StagedUpdate()
        self._reading = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class's calls torch.accelerator.synchronize(), which waits for the staging; a CPU has none.
        assert self._update is not None
        self._submit(self._stage_payload, lambda: self.receive(self.parse_update_info(update_info)))

    def read_part(self, part: FilePart) -> None:
        """`update_weights` from a file of this host."""
        assert self._update is not None
        self._update.from_files = True
        self._reading = FileRead(part, Path(self.checkpoint), self.device)
        has_one = isinstance(self.updated, PolicyAndDrafter) and self.updated.own_checkpoint
        # A stored version may be older than a configuration without a drafter.
        unused = part.names[0].startswith(DRAFTER) and not has_one
        chunks: Chunks = tuple[ReceivedChunk]().__iter__ if unused else self._reading.chunks
        self._submit(self._stage_payload, chunks)

    def _submit(self, stage: Callable[..., None], *arguments: Any) -> None:
        self._submitted = self._thread.submit(self._stage, self._update, stage, *arguments)

    def finish_weight_update(self) -> None:
        assert self._update is not None
        with torch.inference_mode():
            self.staging.swap()
        self.retained.commit()
        self._update = None
        self._thread.submit(self.staging.retire)

    def progress(self, wait_s: float = 0.0) -> StagingState:
        update = self._reported
        wait([self._submitted], wait_s)
        return update.state

    def verify(self) -> StagingState:
        update = self._update
        assert update is not None
        if update.state.outcome is Outcome.DONE and not update.state.digest:
            self._thread.run(self._finalize_if_due, update, limit_s=VERIFY_S)
        return update.state

    def _finalize_if_due(self, update: StagedUpdate) -> None:
        # The last payload, already staged, may have finalized or failed.
        if update.state.outcome is Outcome.DONE and not update.state.digest:
            update.run(partial(self._finalize, update))

    def drop(self) -> None:
        """Not `abort` after reading a file: it may close the connection."""
        self._update = None
        self.retained.begin(None)
        (self if self._reading is None else self._reading).abort()
        self._thread.run(self._drop_staging, limit_s=DROP_S)

    def _drop_staging(self) -> None:
        """Also releases the publisher's memory."""
        self.staging.drop()

    def abort(self) -> None:
        """End a transfer that waits for a peer. Called on any thread."""

    def shutdown(self) -> None:
        self._update = None
        self.abort()
        try:
            self._thread.run(self.staging.release, limit_s=DROP_S)
        finally:
            self._thread.renew()

    def _stage(self, update: StagedUpdate, stage: Callable[..., None], *arguments: Any) -> None:
        start = time.perf_counter()
        if update is self._update and update.state.outcome is Outcome.DONE:
            update.run(partial(stage, update, *arguments))
        stage_s = update.state.stage_s + time.perf_counter() - start
        update.note(stage_s=stage_s, payloads_done=update.state.payloads_done + 1)

    def _stage_payload(self, update: StagedUpdate, chunks: Chunks) -> None:
        self._throttle.begin(self.share)
        for received in chunks():
            self._stage_chunk(update, received)
            if self._stream is None:
                self._check_open(update)
            elif self.share < 1.0:
                wait_for(self._stream.record_event())
                time.sleep(self._throttle.delay_s(received.chunk.size_bytes))
                self._throttle.resume()
        update.compare_digests()
        one_payload = self.one_payload and not update.from_files
        if self.schema is None:
            is_complete = one_payload
        else:  # a drafter's may follow
            expected = self._expected(update) if one_payload else self.schema
            is_complete = not missing(expected, update.offered)
        if is_complete:
            self._finalize(update)  # not in `verify`, for which the engine waits

    def _check_open(self, update: StagedUpdate) -> None:
        if update is not self._update:  # `drop` waits for this thread
            raise TransferFailed("the update was dropped")

    def _stage_chunk(self, update: StagedUpdate, received: ReceivedChunk) -> None:
        chunk = received.chunk
        if self.schema is not None and chunk not in self._matching:
            problems = mismatches(self.schema, chunk.offered, complete=False)
            if problems:
                raise ValueError(join_reasons(problems))
            self._matching.add(chunk)
        update.offer(chunk.offered)
        start = time.perf_counter()
        found = self.staging.replay(received)
        if found is None:
            tensors = received.named()
            found = inspect([tensor for _, tensor in tensors])
            update.note(verify_s=update.state.verify_s + time.perf_counter() - start)
            self.staging.add(chunk, tensors)
        self.retained.add(received)
        update.add(received, found)

    def _finalize(self, update: StagedUpdate) -> None:
        if self.schema is None:  # only vLLM's own loader knows the model's tensors
            update.checks -= {Check.NAMES, Check.SHAPES, Check.DTYPES, Check.COMPLETE}
        elif absent := missing(self._expected(update), update.offered):
            raise ValueError(join_reasons(absent))
        self._check_shared(update)
        unfilled = self.staging.finalize(
            complete=self.schema is not None,
            check_open=partial(self._check_open, update),
            keep_drafter=not self._has_drafter(update),
        )
        if unfilled:
            reasons = [f"parameter {name!r} received no or not all weights" for name in unfilled]
            raise ValueError(join_reasons(reasons))
        if isinstance(self.updated, PolicyAndDrafter):
            update.note(drafter=self._has_drafter(update))
        update.complete()

    def _has_drafter(self, update: StagedUpdate) -> bool:
        if not isinstance(self.updated, PolicyAndDrafter):
            return False
        if self.updated.own_checkpoint:
            return any(name.startswith(DRAFTER) for name in update.offered)
        return self.schema is None or not self._mtp.isdisjoint(update.offered)

    def _expected(self, update: StagedUpdate) -> Schema:
        """All tensors, or all but the drafter's; without those it takes from the policy."""
        assert self.schema is not None
        optional = self._mtp if self._mtp.isdisjoint(update.offered) else frozenset()
        if self._drafter:
            assert isinstance(self.updated, PolicyAndDrafter)
            kept = not self._has_drafter(update)
            optional = {name for name in self._drafter if kept or self.updated.shares(name)}
        return {name: spec for name, spec in self.schema.items() if name not in optional}

    def _check_shared(self, update: StagedUpdate) -> None:
        """vLLM holds some tensors once, for the policy and the drafter: both must be equal."""
        if not isinstance(self.updated, PolicyAndDrafter):
            return
        shared = {name for name in update.offered if name.startswith(DRAFTER) and self.updated.shares(name)}
        policy = update.digests_of({name for name in update.offered if not name.startswith(DRAFTER)})
        wrong = [name for name in shared if not update.digests_of({name}) <= policy]
        if wrong:
            raise ValueError(
                f"{join_reasons(sorted(wrong))} must equal a tensor of the policy: they were equal when this "
                "engine started, so it has one tensor for both; leave it out"
            )


class Throttle:
    """Delays between chunks on a GPU, from the cost per byte of the fastest chunk so far. None after the
    first, which compiles kernels."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._per_byte: float | None = None  # seconds
        self._share = 1.0
        self._since = clock()

    def begin(self, share: float) -> None:
        self._share = share
        self._since = self._clock()

    def delay_s(self, size_bytes: int) -> float:
        elapsed = self._clock() - self._since
        per_byte = elapsed / max(size_bytes, 1)
        if self._per_byte is None:
            self._per_byte = per_byte
            return 0.0
        self._per_byte = min(self._per_byte, per_byte)
        return max(0.0, self._per_byte * size_bytes / self._share - elapsed)

    def resume(self) -> None:
        self._since = self._clock()


class StagingThread:
    """Runs work in order, without gradients; on a GPU, on a stream beside the engine's."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._engine_threads = torch.get_num_threads()
        self._executor = self._new_executor()

    def submit(self, work: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        return self._executor.submit(self._beside_the_engine, work, *arguments)

    def _beside_the_engine(self, work: Callable[..., Any], *arguments: Any) -> Any:
        with torch.no_grad(), torch.cuda.stream(self.stream):  # selects its device too; None: nothing
            return work(*arguments)

    def run(self, work: Callable[..., None], *arguments: Any, limit_s: float) -> None:
        try:
            self.submit(work, *arguments).result(limit_s)
        except TimeoutError as error:
            raise RuntimeError(f"the staging thread did not finish within {limit_s:g} s") from error

    def renew(self) -> None:
        """The old thread exits after its work."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._executor = self._new_executor()

    def _new_executor(self) -> ThreadPoolExecutor:
        if self.stream is not None:
            return ThreadPoolExecutor(1, "staging")
        # On a CPU the engine's parallel operations wait for their slowest thread.
        return ThreadPoolExecutor(1, "staging", set_num_threads, (max(1, self._engine_threads // 4),))


def wait_for(event: torch.Event) -> None:
    # event.synchronize() spins, on a core and in the driver, beside the thread that decodes.
    while not event.query():
        time.sleep(_POLL_S)


def make_staging(vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module) -> Staging:
    """Raises ValueError if the configured staging cannot serve this model."""
    # Trainers import this module too, and vLLM's layers take five seconds.
    from deployments.weights.staging.cpu_shadow import cpu_shadow_staging
    from deployments.weights.staging.host import HostStaging

    configured = vllm_config.additional_config.get("staging", "host")
    if configured in ("device", "automatic") and device.type == "cpu":
        try:
            return cpu_shadow_staging(vllm_config, model)
        except ValueError as error:
            if configured == "device":
                raise
            logger.warning("%s; updates load inside the pause", error)
    elif configured == "device":
        from deployments.weights.staging.device import DeviceStaging

        return DeviceStaging(vllm_config, device, model)
    return HostStaging(model, vllm_config.model_config)
