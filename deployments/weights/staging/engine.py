"""The replica's half of every transport: receive while generating, check, swap between two steps.

    start_weight_update     a session begins; live weights are not touched
    update_weights          returns at once; a thread receives one payload into the staging
    progress / verify       asked for by the follower, through the worker extension
    finish_weight_update    the swap, inside a pause of the scheduler
    drop                    forgets the session; the live weights were never touched

vLLM calls the first, second and fourth itself (`WeightTransferEngine`); a transport adds only how
a payload becomes chunks of bytes (`receive`).
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deployments.errors import TransferFailed
from deployments.protocol import Outcome
from deployments.weights.staging.progress_page import StatePage
from deployments.weights.staging.staged_update import Evidence, Session
from deployments.weights.staging.throttle import Pace
from deployments.weights.store.retained import Keeper
from deployments.weights.wire.checkpoint_schema import join_reasons, mismatches, missing, read_schema
from deployments.weights.wire.chunk_layout import Chunk
from deployments.weights.wire.digest import inspect
from deployments.weights.wire.digest_definition import Findings
from deployments.weights.wire.received_chunk import ReceivedChunk

_POLL_S = 0.0001
Tensors = list[tuple[str, torch.Tensor]]
Init = TypeVar("Init", bound=WeightTransferInitInfo)
Update = TypeVar("Update", bound=WeightTransferUpdateInfo)


class Staging(Protocol):
    """Where a version waits until the fleet has decided."""

    def begin(self) -> None: ...

    def replay(self, arrival: ReceivedChunk) -> Findings | None:
        """Take a chunk that is known from a former round, and look into it on the way; else None.

        Called on the staging thread, while the engine decodes. On a GPU the copies are only queued, on
        the current stream; the arrival's memory is reused in the order of that stream.
        """

    def add(self, chunk: Chunk, tensors: Tensors) -> None:
        """The same for a chunk that is not known: its tensors, by Hugging Face name."""

    def plans(self) -> dict[str, Any]:
        """How many chunks `replay` takes ("chunks"), and why it does not take others ("refused")."""

    def seal(self, *, complete: bool) -> list[str]:
        """Nothing more comes: finish what loading left open. Called on the staging thread.

        Args:
            complete: every tensor of the model's checkpoint came, so that what was never written is
                padding and not a tensor that is missing.

        Returns:
            The model's parameters that were not filled.
        """

    def swap(self) -> None:
        """Make the staged version the live one. Called with the scheduler paused, on the thread and the
        stream of the model; on a GPU the copy is only queued."""

    def drop(self) -> None: ...

    def release(self) -> None:
        """Keep no memory in which chunks arrive: its connection ends."""


class StagedWeightTransferEngine(WeightTransferEngine[Init, Update], Generic[Init, Update]):
    """Base of the four transports on the replica's side."""

    supports_draft_weight_update = False
    one_payload = True  # a version comes as one payload, not as one a chunk
    share = 1.0  # of the time that staging may take from the device while it receives

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.staging = self._make_staging(vllm_config, model)
        self.keeper = Keeper(vllm_config.model_config.model)
        self._expected = read_schema(Path(vllm_config.model_config.model))
        self._fitting: WeakSet[Chunk] = WeakSet()  # to the model
        self._session: Session | None = None
        self._states: StatePage | None = None
        self._connecting: Future[None] = Future()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging")
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def _make_staging(self, vllm_config: VllmConfig, model: torch.nn.Module) -> Staging:
        mode = vllm_config.additional_config.get("staging", "host")
        if mode == "device":
            from deployments.weights.staging.device import DeviceStaging

            return DeviceStaging(vllm_config, self.device, model)
        from deployments.weights.staging.host import HostStaging

        return HostStaging(model, vllm_config.model_config)

    @abstractmethod
    def connect(self, init_info: Init) -> None:
        """Join the transfer group. Runs on the staging thread and may wait for peers."""

    @abstractmethod
    def receive(self, update_info: Update) -> Iterator[ReceivedChunk]:
        """The chunks of one payload, in their order."""

    def init_transfer_engine(self, init_info: Init) -> None:
        # A rendezvous waits for the other members: on the engine's own thread it would stop decoding.
        self._connecting = self._thread.submit(self._connect, init_info)

    def _connect(self, init_info: Init) -> None:
        with self._beside_the_engine():
            self.staging.release()
            self.connect(init_info)

    def connected(self) -> dict[str, Any]:
        """Whether the last `init_transfer_engine` is through, and how it ended."""
        error = self._connecting.exception() if self._connecting.done() else None
        broken = Outcome.BROKEN if isinstance(error, TransferFailed) else Outcome.FAILED
        outcome = Outcome.DONE if error is None else broken
        return {"done": self._connecting.done(), "outcome": outcome.value, "message": str(error or "")}

    def receive_weights(self, update_info: Update) -> None:
        raise AssertionError("payloads are staged by update_weights, never loaded directly")

    def start_weight_update(self) -> None:
        self._session = Session()
        if self._states is not None:  # the former session's state would be taken for this one's
            self._states.write(self.worker_index, None)
        self.keeper.begin()
        self.staging.begin()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # torch.accelerator.synchronize() of the base class raises where there is no accelerator,
        # and would wait for the staging where there is one.
        assert self._session is not None
        self._thread.submit(self._stage, self._session, update_info)

    def finish_weight_update(self) -> None:
        assert self._session is not None
        with torch.inference_mode():
            self.staging.swap()
        self.keeper.commit()
        self._session = None

    def report_to(self, page: str) -> bool:
        """Tell the session's state in this `StatePage` from now on; False if it is on another host."""
        self._states = None
        try:
            self._states = StatePage.open(page)
        except ValueError:
            return False
        return True

    @property
    def worker_index(self) -> int:
        """This worker's place among all workers of its replica."""
        parallel = self.parallel_config
        return int(parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def progress(self) -> dict[str, Any]:
        """How far the session's payloads are; see `Session.state`."""
        assert self._session is not None
        return self._session.state()

    def verify(self) -> dict[str, Any]:
        """The session's state when the staged version is complete and fits the model, or why it does not."""
        session = self._session
        assert session is not None
        if session.outcome is Outcome.DONE and not session.sealed:
            self._thread.submit(self._guarded, session, self._seal).result()
        return session.state()

    def drop(self) -> None:
        """Forget the session. A payload that is still arriving ends by itself or is cut off by `abort`."""
        self._session = None
        self.keeper.begin()
        self.abort()
        self._thread.submit(self._forget).result()

    def _forget(self) -> None:
        with self._beside_the_engine():
            self.staging.drop()

    def abort(self) -> None:
        """Break a transfer that waits for a peer."""

    def shutdown(self) -> None:
        self.abort()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self.staging.release()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging")

    def _beside_the_engine(self) -> AbstractContextManager[Any]:
        """The staging thread's device and stream: what it queues runs while the engine decodes."""
        stack = ExitStack()
        stack.enter_context(torch.no_grad())
        if self._stream is not None:
            stack.enter_context(torch.cuda.device(self.device))
            stack.enter_context(torch.cuda.stream(self._stream))
        return stack

    def _stage(self, session: Session, update_info: dict[str, Any]) -> None:
        start = time.perf_counter()
        if session is self._session and session.outcome is Outcome.DONE:
            self._guarded(session, lambda s: self._take(s, update_info))
        session.stage_s += time.perf_counter() - start
        session.payloads_done += 1
        if session is self._session and self._states is not None:
            self._states.write(self.worker_index, session.state())

    def _guarded(self, session: Session, work: Callable[[Session], None]) -> None:
        """Run a part of the staging on its thread; what goes wrong becomes the session's outcome."""
        try:
            with self._beside_the_engine():
                work(session)
        except TransferFailed as error:
            session.outcome, session.message = Outcome.BROKEN, str(error)
        except ValueError as error:  # what a transport or the manifest says of a wrong payload
            session.outcome, session.message = Outcome.REJECTED, str(error)
        except Exception as error:  # a thread's last word: the follower reports it and the fleet decides
            session.outcome, session.message = Outcome.FAILED, f"{type(error).__name__}: {error}"

    def _take(self, session: Session, update_info: dict[str, Any]) -> None:
        pace = Pace(self.share)
        for arrival in self.receive(self.parse_update_info(update_info)):
            self._accept(session, arrival)
            if self._stream is not None and self.share < 1.0:
                wait_for(self._stream.record_event())
                time.sleep(pace.rest(arrival.chunk.size_bytes))
                pace.go_on()
        session.settle()
        expected = self._expected
        if self.one_payload if expected is None else expected.keys() <= session.offered.keys():
            # Here and not in `verify`, for which the engine waits.
            self._seal(session)

    def _accept(self, session: Session, arrival: ReceivedChunk) -> None:
        chunk = arrival.chunk
        if self._expected is not None and chunk not in self._fitting:
            problems = mismatches(self._expected, chunk.offered, complete=False)
            if problems:
                raise ValueError(join_reasons(problems))
            self._fitting.add(chunk)
        start = time.perf_counter()
        found = self.staging.replay(arrival)
        if found is None:
            tensors = arrival.named()
            found = inspect([tensor for _, tensor in tensors])
            session.verify_s += time.perf_counter() - start
            self.staging.add(chunk, tensors)
        if self.keeper.expecting:
            self.keeper.add(arrival.named())
        session.evidence.append(Evidence(names=chunk.offered, sent=arrival.sent, found=found))
        session.offered |= chunk.offered
        session.size_bytes += chunk.size_bytes

    def _seal(self, session: Session) -> None:
        if self._expected is not None:
            absent = missing(self._expected, session.offered)
            if absent:
                raise ValueError(join_reasons(absent))
        unfilled = self.staging.seal(complete=self._expected is not None)
        if unfilled:
            raise ValueError(
                join_reasons([f"parameter {name!r} received no or not all weights" for name in unfilled])
            )
        session.seal()
        if self.keeper.expecting:
            self.keeper.found(session.digests())


def wait_for(event: torch.Event) -> None:
    # Not event.synchronize(): it spins, on a core and in the driver, beside the thread that decodes.
    while not event.query():
        time.sleep(_POLL_S)
