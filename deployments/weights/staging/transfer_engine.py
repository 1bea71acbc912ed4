"""The replica's half of every transport: receive while generating, check, swap between two steps.

    start_weight_update     an update begins; live weights are not touched
    update_weights          returns at once; the staging thread receives one payload
    progress / verify       called by the replica, through the worker extension
    finish_weight_update    the swap, inside a pause of the scheduler
    drop                    discards the update; live weights were never touched

vLLM calls the first, second and fourth (`WeightTransferEngine`); a transport adds only how a payload becomes
chunks (`receive`). Everything that may wait for a peer runs on the staging thread, so decoding goes on.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deployments.host.thread_priority import CoreShare
from deployments.protocol.errors import TransferFailed
from deployments.protocol.poll import Check, FilePart, Outcome
from deployments.weights.staging.staged_update import ChunkFindings, StagedUpdate
from deployments.weights.staging.staging_thread import DROP_S, VERIFY_S, StagingThread, Throttle, wait_for
from deployments.weights.staging.worker_reports import ConnectState, ProgressPage, StagingState
from deployments.weights.store.file_read import FileRead
from deployments.weights.store.hub import cached, copy_model_files, schema_of
from deployments.weights.store.retained import RetainedVersions
from deployments.weights.store.version_writer import SHARE_OF_A_CORE, VersionWriter
from deployments.weights.wire.checkpoint_schema import join_reasons, mismatches, missing
from deployments.weights.wire.chunk_layout import Chunk, ReceivedChunk
from deployments.weights.wire.digest import inspect
from deployments.weights.wire.received_files import ReceivedFiles

Init = TypeVar("Init", bound=WeightTransferInitInfo)
Update = TypeVar("Update", bound=WeightTransferUpdateInfo)
Chunks = Callable[[], Iterator[ReceivedChunk]]


class StagedWeightTransferEngine(WeightTransferEngine[Init, Update], Generic[Init, Update]):
    """Base of all transports on the replica's side.

    Its methods are called on the engine's thread; `connect`, `receive` and the staging run on one thread of
    their own, in the order in which they were submitted.
    """

    supports_draft_weight_update = False
    one_payload = True  # a version is one payload; False: one per chunk
    share = 1.0  # of the device's time, the most that staging may take while it receives

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        # Not at the top: it loads vLLM's layers. A trainer loads its transport's module too, without need of
        # them, and they took five seconds of its first publish.
        from deployments.weights.staging.host import make_staging

        super().__init__(config, vllm_config, device, model)
        # Not `model_config.model`: for a replica that caught up that is a version in the store, which will be
        # removed.
        started_from = vllm_config.additional_config.get("checkpoint", vllm_config.model_config.model)
        loading = vllm_config.load_config
        checkpoint = cached(started_from, vllm_config.model_config.revision, loading.download_dir)
        self.checkpoint = str(checkpoint)
        self.staging = make_staging(vllm_config, self.device, model)
        self.retained = RetainedVersions()
        self.version_writer = VersionWriter(
            write_files=partial(copy_model_files, self.checkpoint),
            share=SHARE_OF_A_CORE if self.device.type == "cpu" else 1.0,
        )
        # One that caught up may be on a host without the hub's files: a version in the store is complete too.
        source = checkpoint if checkpoint.is_dir() else Path(vllm_config.model_config.model)
        self.schema = schema_of(source, loading.load_format, of_hub=self.checkpoint != started_from)
        self._matching: WeakSet[Chunk] = WeakSet()  # chunks whose tensors are the model's
        self._update: StagedUpdate | None = None
        self._reading: FileRead | None = None  # what the update reads from a file
        self._page: ProgressPage | None = None
        self._connecting: Future[None] = Future()
        self._thread = StagingThread(self.device)
        self._stream = self._thread.stream
        self._throttle = Throttle()
        self._core_share = CoreShare()

    @property
    def worker_index(self) -> int:
        """This worker's index among all workers of its replica."""
        parallel = self.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)

    @abstractmethod
    def connect(self, init_info: Init) -> None:
        """Join the transfer group. Runs on the staging thread and may wait for peers.

        Raises:
            TransferFailed: a peer is gone, or did not join in time.
        """

    @abstractmethod
    def receive(self, update_info: Update) -> Iterator[ReceivedChunk]:
        """The chunks of one payload, in their order. Runs on the staging thread and may wait for peers.

        Raises:
            TransferFailed: a peer is gone, or sent nothing in time.
            ValueError: the payload is wrong: what was expected and what was received.
        """

    def init_transfer_engine(self, init_info: Init) -> None:
        self._reading = None
        # A rendezvous waits for the other members: on the engine's own thread it would stop decoding.
        self._connecting = self._thread.submit(self._connect, init_info)

    def _connect(self, init_info: Init) -> None:
        with self._beside_the_engine():
            self.staging.release()
            self.connect(init_info)

    def connected(self) -> ConnectState:
        """Whether the last `init_transfer_engine` has ended, and how."""
        error = self._connecting.exception() if self._connecting.done() else None
        outcome = Outcome.DONE if error is None else Outcome.REPLICA_FAILED
        missing: tuple[int, ...] = ()
        if isinstance(error, TransferFailed):
            outcome, missing = Outcome.TRANSFER_FAILED, error.missing_ranks
        message = str(error or "")
        return ConnectState(
            done=self._connecting.done(), outcome=outcome, message=message, missing_ranks=missing
        )

    def receive_weights(self, update_info: Update) -> None:
        raise AssertionError("payloads are staged by update_weights, never loaded directly")

    def start_weight_update(self) -> None:
        self._begin(StagedUpdate())
        self.retained.begin()
        self.staging.begin()

    def _begin(self, update: StagedUpdate) -> None:
        self._update, self._reading = update, None
        if self._page is not None:  # the report of the former update would be taken for this one's
            self._page.write(self.worker_index, None)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # torch.accelerator.synchronize() of the base class raises where there is no accelerator,
        # and would wait for the staging where there is one.
        assert self._update is not None
        chunks = partial(self._receive, update_info)
        self._thread.submit(self._stage, self._update, partial(self._stage_payload, chunks=chunks))

    def _receive(self, update_info: dict[str, Any]) -> Iterator[ReceivedChunk]:
        return self.receive(self.parse_update_info(update_info))

    def receive_files(self, update_info: dict[str, Any], directory: str) -> None:
        """An update of its own: one payload, whose tensors are the bytes of files. It touches nothing of the
        model and is complete when `progress` says that the payload is done. The first worker writes them."""
        self._begin(update := StagedUpdate())
        files = ReceivedFiles(Path(directory) if self.worker_index == 0 else None)
        chunks = partial(self._receive, update_info)
        self._thread.submit(self._stage, update, partial(self._stage_files, chunks=chunks, files=files))

    def read_part(self, part: FilePart) -> None:
        """`update_weights` with tensors from a file of this host instead of the transport's. The transport's
        connection stays as it is."""
        assert self._update is not None
        self._update.from_files = True
        self._reading = FileRead(part, Path(self.checkpoint), self.device)
        chunks = self._reading.chunks
        self._thread.submit(self._stage, self._update, partial(self._stage_payload, chunks=chunks))

    def finish_weight_update(self) -> None:
        assert self._update is not None
        with torch.inference_mode():
            self.staging.swap()
        self.retained.commit()
        self._update = None
        self._thread.submit(self._retire)

    def _retire(self) -> None:
        with self._beside_the_engine():
            self.staging.retire()

    def report_to(self, page: str) -> bool:
        """Write progress to this `ProgressPage` from now on; False if it is on another host."""
        self._page = None
        try:
            self._page = ProgressPage.open(page)
        except ValueError:
            return False
        return True

    def progress(self) -> StagingState:
        """How far the update is."""
        assert self._update is not None
        return self._update.report()

    def verify(self) -> StagingState:
        """Check that the staged version is complete and is the model's; the outcome says why it is not."""
        update = self._update
        assert update is not None
        if update.outcome is Outcome.DONE and not update.is_complete:
            self._core_share.begin(1.0)  # the engine waits: nobody decodes meanwhile
            self._thread.run(self._guarded, update, self._finalize, limit_s=VERIFY_S)
        return update.report()

    def drop(self) -> None:
        """Discard the update. A payload that is still arriving ends by itself or is ended by `abort`, which
        may also end a connection: not where a file was read, even if it is dropped twice."""
        self._update = None
        self.retained.begin()
        (self if self._reading is None else self._reading).abort()
        self._thread.run(self._drop_staging, limit_s=DROP_S)

    def _drop_staging(self) -> None:
        with self._beside_the_engine():
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

    # -- on the staging thread ----------------------------------------------------------------

    def _beside_the_engine(self) -> AbstractContextManager[Any]:
        """The staging thread's device and stream: what it queues runs while the engine decodes."""
        stack = ExitStack()
        stack.enter_context(torch.no_grad())
        if self._stream is not None:
            stack.enter_context(torch.cuda.device(self.device))
            stack.enter_context(torch.cuda.stream(self._stream))
        return stack

    def _stage(self, update: StagedUpdate, payload: Callable[[StagedUpdate], None]) -> None:
        start = time.perf_counter()
        if update is self._update and update.outcome is Outcome.DONE:
            self._guarded(update, payload)
        update.stage_s += time.perf_counter() - start
        update.payloads_done += 1
        if update is self._update and self._page is not None:
            self._page.write(self.worker_index, update.report())

    def _guarded(self, update: StagedUpdate, work: Callable[[StagedUpdate], None]) -> None:
        """Run a part of the staging on its thread; what it raises becomes the outcome of the update."""

        def beside_the_engine() -> None:
            with self._beside_the_engine():
                work(update)

        update.run(beside_the_engine)

    def _stage_payload(self, update: StagedUpdate, chunks: Chunks) -> None:
        self._throttle.begin(self.share)
        self._core_share.begin(self.share)
        for received in chunks():
            self._stage_chunk(update, received)
            if self._stream is None:
                self._rest(update)
            elif self.share < 1.0:
                wait_for(self._stream.record_event())
                time.sleep(self._throttle.delay_s(received.chunk.size_bytes))
                self._throttle.resume()
        update.compare_digests()
        if update.has_all(self.schema, one_payload=self.one_payload):
            # Here and not in `verify`, for which the engine waits.
            self._finalize(update)

    def _rest(self, update: StagedUpdate) -> None:
        """Between two units of work on a CPU.

        Raises:
            TransferFailed: the update was dropped; whoever dropped it waits for this thread.
        """
        if update is not self._update:
            raise TransferFailed("the update was dropped")
        self._core_share.rest()

    def _stage_files(self, update: StagedUpdate, chunks: Chunks, files: ReceivedFiles) -> None:
        try:
            for received in chunks():
                update.offer(received.chunk.offered)
                tensors = received.named()
                found = inspect([tensor for _, tensor in tensors])
                files.add(tensors)
                update.pending.append(
                    ChunkFindings(names=received.chunk.offered, sent=received.sent, found=found)
                )
                update.size_bytes += received.chunk.size_bytes
            update.compare_digests()
            files.complete()
        finally:
            files.close()

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
            update.verify_s += time.perf_counter() - start
            self.staging.add(chunk, tensors)
        if self.retained.expecting:
            self.retained.add(received.named())
        update.pending.append(ChunkFindings(names=chunk.offered, sent=received.sent, found=found))
        update.size_bytes += chunk.size_bytes

    def _finalize(self, update: StagedUpdate) -> None:
        if self.schema is not None:
            absent = missing(self.schema, update.offered)
            if absent:
                raise ValueError(join_reasons(absent))
        complete = self.schema is not None
        if not complete:  # only vLLM's own loader knows the model's tensors
            update.checks -= {Check.NAMES, Check.SHAPES, Check.DTYPES, Check.COMPLETE}
        unfilled = self.staging.finalize(complete=complete, rest=partial(self._rest, update))
        if unfilled:
            raise ValueError(
                join_reasons([f"parameter {name!r} received no or not all weights" for name in unfilled])
            )
        update.complete()
        if self.retained.expecting:
            self.retained.set_digests(update.digests())
