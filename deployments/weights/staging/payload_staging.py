"""What the staging thread does with a payload: each chunk is checked, digested and staged."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from vllm.config import ParallelConfig

from deployments.errors import TransferFailed
from deployments.protocol.reports import Check, Outcome
from deployments.thread_priority import CoreShare
from deployments.weights.staging.base import Staging
from deployments.weights.staging.progress_page import ProgressPage
from deployments.weights.staging.staged_update import ChunkFindings, StagedUpdate
from deployments.weights.staging.staging_thread import wait_for
from deployments.weights.staging.throttle import Throttle
from deployments.weights.store.retained import RetainedVersions
from deployments.weights.wire.checkpoint_schema import Schema, join_reasons, mismatches, missing
from deployments.weights.wire.chunk_layout import Chunk, ReceivedChunk
from deployments.weights.wire.digest import inspect
from deployments.weights.wire.received_files import ReceivedFiles

Chunks = Callable[[], Iterator[ReceivedChunk]]


class PayloadStaging:
    """Base of the transfer engine, which sets what is declared here."""

    one_payload = True  # a version is one payload; False: one per chunk
    share = 1.0  # of the device's time, the most that staging may take while it receives

    device: torch.device
    parallel_config: ParallelConfig
    staging: Staging
    schema: Schema | None
    retained: RetainedVersions
    _update: StagedUpdate | None
    _page: ProgressPage | None
    _matching: WeakSet[Chunk]  # chunks whose tensors are the model's
    _stream: torch.cuda.Stream | None
    _throttle: Throttle
    _core_share: CoreShare

    @property
    def worker_index(self) -> int:
        """This worker's index among all workers of its replica."""
        parallel = self.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)

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
