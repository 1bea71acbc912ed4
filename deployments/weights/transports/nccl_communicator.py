"""The group of transport `nccl`: a communicator with its own stream, whose waits can all be aborted.

A thread waits for NCCL only by polling, with a deadline, and queues nothing behind a broadcast that has not
finished: then a dead peer leaves no stream stuck, and the group is aborted. Before each broadcast the members
synchronize on the host: a kernel blocked on a peer occupies SMs that the model needs.
"""

import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch.distributed import PrefixStore
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

from deployments.errors import TransferFailed
from deployments.weights.transports.nccl_creation import (
    Create,
    by_store,
    create_in_time,
    rendezvous_with_nccl,
)
from deployments.weights.transports.rendezvous import RendezvousInfo
from deployments.weights.transports.roll_call import RollCall

BUFFERS = 2
_POLL_S = 0.0001
_CALL_S = 0.2  # an abort waits this long for a call in progress
_STARTED = "started"  # key of the number of broadcasts that members have started, over all members
_WATCH_S = 0.25
_WARM_UP_BYTES = 4 << 20


class NcclGroup:
    """A communicator with its own stream and two buffers, whose waits can be aborted.

    Args:
        check: raises to end the wait for the members; called every few milliseconds.

    Raises:
        ValueError: NCCL does not work here or at a peer.
        TransferFailed: a member did not join, or is gone.
    """

    def __init__(
        self, info: RendezvousInfo, rank: int, device: torch.device, check: Callable[[], None]
    ) -> None:
        self._timeout_s = info.timeout_s
        self._device = device
        self._world_size = info.world_size
        self._started = 0
        self._store, create = self.meet(info, rank, device, check)
        self._roll_call = RollCall(self._store, rank, info.world_size)
        self._communicator: PyNcclCommunicator | None
        self._communicator = create_in_time(create, info, rank, self._roll_call, check)
        self._stream = torch.cuda.Stream(device)
        # Allocated once: an allocation during a broadcast may make the driver wait for all streams.
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self._done = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._calling = threading.Lock()
        self._call_deadline = math.inf
        # One watchdog thread for all calls: to start one for each would cost as much as the call.
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="nccl-watchdog", daemon=True).start()
        self.warm_up()

    def meet(
        self, info: RendezvousInfo, rank: int, device: torch.device, check: Callable[[], None]
    ) -> tuple[PrefixStore, Create]:
        """Wait for the other members: the store that they share, and what creates the communicator. Raises
        as above."""
        store = rendezvous_with_nccl(info, rank, check)
        return store, by_store(store, info.world_size, rank, device)

    def warm_up(self) -> None:
        """Make NCCL connect now, when all members are present; in the first round one may be dead."""
        self.reserve(_WARM_UP_BYTES)
        self.start(0, _WARM_UP_BYTES)
        self.wait(0)

    @property
    def counted(self) -> int:
        """How many members count the broadcasts that they have started, in the store."""
        return self._world_size

    @property
    def alive(self) -> bool:
        """Whether the group was not aborted."""
        return self._communicator is not None

    def abort_overdue_call(self) -> None:
        """Abort the group if a call into NCCL has exceeded the timeout."""
        if time.monotonic() > self._call_deadline:
            self.abort()

    def reserve(self, size_bytes: int) -> None:
        """Make the buffers at least this large."""
        if self._buffers[0].numel() < size_bytes:
            self._buffers = []  # free the smaller ones first
            self._buffers = [
                torch.empty(size_bytes, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)
            ]

    def buffer(self, index: int, size_bytes: int) -> torch.Tensor:
        """The buffer of broadcast `index` (uint8 [size_bytes])."""
        return self._buffers[index % BUFFERS][:size_bytes]

    def start(self, index: int, size_bytes: int, check: Callable[[], None] = lambda: None) -> None:
        """`start_all` with one broadcast of a whole buffer."""
        self.start_all(index, [self.buffer(index, size_bytes)], check)

    def start_all(
        self, index: int, parts: Sequence[torch.Tensor], check: Callable[[], None] = lambda: None
    ) -> None:
        """Wait for the other members, then queue the broadcasts of parts of buffer `index`, ordered after the
        current stream.

        Args:
            check: raises to end the wait; called every few milliseconds.

        Raises:
            TransferFailed: a member is gone, or exceeded the timeout, or `abort` was called.
        """
        self._await_peers(check)
        # NCCL may connect to its peers inside the call and wait there for a dead one: the watchdog ends that.
        self._call_deadline = time.monotonic() + self._timeout_s
        try:
            with self._calling:
                communicator = self._communicator
                if communicator is None:
                    raise TransferFailed("the transfer group was aborted")
                self._stream.wait_stream(torch.cuda.current_stream())
                for part in parts:
                    communicator.broadcast(part, src=0, stream=self._stream)
                self._done[index % BUFFERS].record(self._stream)
        except RuntimeError as error:  # NCCL_CHECK has no finer class
            missing = self._roll_call.missing(self._started, check)
            raise TransferFailed(f"the transfer group failed: {error}", missing) from error
        finally:
            self._call_deadline = math.inf

    def wait(self, index: int, check: Callable[[], None] = lambda: None) -> None:
        """Wait until the buffer's broadcast has finished; then the current stream may use the buffer.

        Args:
            check: raises to end the wait; called every few milliseconds.

        Raises:
            TransferFailed: a member is gone, or exceeded the timeout, or `abort` was called.
        """
        done = self._done[index % BUFFERS]
        self._wait_until(done.query, check)
        torch.cuda.current_stream().wait_event(done)

    def finish(self) -> None:
        """All broadcasts of a round are done on this member."""
        self._roll_call.finished(self._started)

    def _await_peers(self, check: Callable[[], None]) -> None:
        self._started += 1
        # One sum for all broadcasts: no member adds for the next one before all have added for this one.
        needed = self._started * self.counted
        if self._add_started(1) < needed:
            self._wait_until(lambda: self._add_started(0) >= needed, check)

    def _add_started(self, more: int) -> int:
        try:
            return self._store.add(_STARTED, more)
        except RuntimeError as error:  # torch has no finer class
            raise TransferFailed(f"the transfer group failed: its store is unreachable: {error}") from error

    def _wait_until(self, reached: Callable[[], bool], check: Callable[[], None]) -> None:
        now = time.monotonic()
        deadline, ask_at = now + self._timeout_s, now + _WATCH_S
        while not reached():
            check()
            if self._communicator is None:
                break
            now = time.monotonic()
            if now > deadline:
                self._fail(f"no progress in {self._timeout_s:g} s", check)
            if now > ask_at:
                ask_at = now + _WATCH_S
                if self._roll_call.is_called():
                    self._fail("at another member first", check)
            time.sleep(_POLL_S)
        if self._communicator is None:  # an abort also ends the kernel, but without the bytes
            raise TransferFailed("the transfer group was aborted")

    def _fail(self, problem: str, check: Callable[[], None]) -> NoReturn:
        self.abort()
        missing = self._roll_call.missing(self._started, check)
        raise TransferFailed(f"the transfer group failed: {problem}", missing)

    def abort(self) -> None:
        """End every wait, also on the device. Any thread may call it; the group cannot be used afterwards."""
        # Do not interrupt a call that is about to return; a call that hangs is what an abort is for.
        acquired = self._calling.acquire(timeout=_CALL_S)
        try:
            communicator, self._communicator = self._communicator, None
            if communicator is not None:
                communicator.destroy()  # ncclCommAbort, given up after 5 s
        finally:
            if acquired:
                self._calling.release()


def _watch(group: "weakref.ref[NcclGroup]") -> None:
    while (watched := group()) is not None and watched.alive:
        watched.abort_overdue_call()
        del watched  # this thread must not keep alive a group that its owner has dropped
        time.sleep(_WATCH_S)
