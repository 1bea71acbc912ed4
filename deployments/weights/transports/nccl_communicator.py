"""The group of transport `nccl`: a communicator with a stream of its own, and a way out of every wait.

A thread waits for NCCL only by polling, with a deadline, and queues nothing behind a broadcast before it
has arrived: a dead peer then leaves no stream stuck, and its group is aborted. Members meet on the host
before each broadcast: a kernel that waits for a peer holds processors of which the model is in need.
"""

import ctypes
import math
import threading
import time
import weakref
from collections.abc import Callable

import torch
from torch.distributed import PrefixStore
from vllm import envs
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.distributed.utils import StatelessProcessGroup
from vllm.utils.nccl import find_nccl_library, unpinned_nccl_env

from deployments.errors import TransferFailed
from deployments.weights.transports.rendezvous import MeetingInfo, meet

BUFFERS = 2
NEEDED_NCCL = (2, 29, 7)
_POLL_S = 0.0001
_CALL_S = 0.2
_STARTED = "started"  # broadcasts, by all members
_WATCH_S = 0.25
_WARM_UP_BYTES = 4 << 20


class TransferGroup:
    """A communicator with a stream of its own, two buffers, and a way out of a wait.

    Raises:
        ValueError: NCCL is disabled here or at a peer.
        TransferFailed: a member did not come, or is gone.
    """

    def __init__(self, info: MeetingInfo, rank: int, device: torch.device, check: Callable[[], None]) -> None:
        self._timeout_s = info.timeout_s
        self._device = device
        self._world_size = info.world_size
        self._started = 0
        self._meeting = meet_with_nccl(info, rank, check)
        self._communicator: PyNcclCommunicator | None = form_communicator(
            self._meeting, info.world_size, rank, device
        )
        self._stream = torch.cuda.Stream(device)
        # Taken once: an allocation during a broadcast may make the driver wait for all streams.
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self._done = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._calling = threading.Lock()
        self._call_ends = math.inf
        # One thread for all calls: to start one for each would cost as much as the call.
        threading.Thread(target=_guard, args=(weakref.ref(self),), name="nccl-guard", daemon=True).start()
        # NCCL connects lazily: with everybody present now, not in the first round with a peer that died.
        self.reserve(_WARM_UP_BYTES)
        self.start(0, _WARM_UP_BYTES)
        self.wait(0)

    @property
    def alive(self) -> bool:
        return self._communicator is not None

    def end_overdue_call(self) -> None:
        if time.monotonic() > self._call_ends:
            self.abort()

    def reserve(self, size_bytes: int) -> None:
        if self._buffers[0].numel() < size_bytes:
            self._buffers = []
            self._buffers = [
                torch.empty(size_bytes, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)
            ]

    def buffer(self, index: int, size_bytes: int) -> torch.Tensor:
        return self._buffers[index % BUFFERS][:size_bytes]

    def start(self, index: int, size_bytes: int, check: Callable[[], None] = lambda: None) -> None:
        """Wait for the other members; queue the broadcast of a buffer behind what the current stream has done
        with it.

        Args:
            check: raises when there is nothing to wait for any more.
        """
        self._await_peers(check)
        # NCCL may connect to its peers inside the call and wait there for a dead one: the guard ends that.
        self._call_ends = time.monotonic() + self._timeout_s
        try:
            with self._calling:
                communicator = self._communicator
                if communicator is None:
                    raise TransferFailed("the transfer group was aborted")
                self._stream.wait_stream(torch.cuda.current_stream())
                communicator.broadcast(self.buffer(index, size_bytes), src=0, stream=self._stream)
                self._done[index % BUFFERS].record(self._stream)
        except RuntimeError as error:  # NCCL_CHECK has no finer class
            raise TransferFailed(f"the transfer group broke: {error}") from error
        finally:
            self._call_ends = math.inf

    def wait(self, index: int, check: Callable[[], None] = lambda: None) -> None:
        """Until the buffer's broadcast is through; the current stream may then use the buffer.

        Args:
            check: raises when there is nothing to wait for any more.
        """
        done = self._done[index % BUFFERS]
        self._until(done.query, check)
        torch.cuda.current_stream().wait_event(done)

    def _await_peers(self, check: Callable[[], None]) -> None:
        self._started += 1
        # One sum for all broadcasts: nobody counts for the next one before all have counted for this one.
        needed = self._started * self._world_size
        if self._count(1) < needed:
            self._until(lambda: self._count(0) >= needed, check)

    def _count(self, more: int) -> int:
        try:
            return self._meeting.add(_STARTED, more)
        except RuntimeError as error:  # torch has no finer class
            raise TransferFailed(f"the transfer group broke: its meeting point is gone: {error}") from error

    def _until(self, reached: Callable[[], bool], check: Callable[[], None]) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not reached():
            check()
            if self._communicator is None:
                break
            if time.monotonic() > deadline:
                self.abort()
                raise TransferFailed(f"the transfer group broke: no progress in {self._timeout_s:g} s")
            time.sleep(_POLL_S)
        if self._communicator is None:  # an abort also ends the kernel, without the bytes
            raise TransferFailed("the transfer group was aborted")

    def abort(self) -> None:
        """End every wait, on the device too. Any thread may call it; the group is gone afterwards."""
        # Not in the middle of a call that is about to return; one that hangs is what an abort is for.
        alone = self._calling.acquire(timeout=_CALL_S)
        try:
            communicator, self._communicator = self._communicator, None
            if communicator is not None:
                communicator.destroy()  # ncclCommAbort, given up after 5 s
        finally:
            if alone:
                self._calling.release()


def _guard(group: "weakref.ref[TransferGroup]") -> None:
    while (guarded := group()) is not None and guarded.alive:
        guarded.end_overdue_call()
        del guarded  # an owner that forgets the group must not find it kept alive here
        time.sleep(_WATCH_S)


def meet_with_nccl(info: MeetingInfo, rank: int, check: Callable[[], None]) -> PrefixStore:
    """`meet`, where every member says whether its NCCL works: one that does not would leave the others in
    ncclCommInitRank, which has no deadline and cannot be aborted from outside."""
    meeting, faults = meet(info, rank, check, word=nccl_fault())
    found = [f"rank {peer}: {fault}" for peer, fault in enumerate(faults) if fault]
    if found:
        raise ValueError(f"transport 'nccl' does not work; {'; '.join(found)}")
    return meeting


def form_communicator(
    meeting: PrefixStore, world_size: int, rank: int, device: torch.device
) -> PyNcclCommunicator:
    group = StatelessProcessGroup(rank=rank, world_size=world_size, store=meeting)
    with unpinned_nccl_env(), torch.cuda.device(device):
        communicator = PyNcclCommunicator(group, device=device)
    # A disabled communicator's broadcast does nothing and reports success: the fleet would serve garbage.
    if communicator.disabled or not communicator.available:
        raise ValueError("transport 'nccl' does not work: vLLM has disabled its NCCL communicator")
    return communicator


def nccl_fault() -> str:
    """Why vLLM's NCCL communicator would disable itself here; empty if it would not."""
    if envs.VLLM_DISABLE_PYNCCL:
        return "VLLM_DISABLE_PYNCCL is set"
    path = "libnccl"
    try:
        path = find_nccl_library()
        NCCLLibrary(path)
    except Exception as error:  # the loader's own word, whatever it is
        needed = ".".join(map(str, NEEDED_NCCL))
        return (
            f"vLLM cannot use {path}, version {_version(path)}: {error}; NCCL {needed} or newer is needed, "
            "and VLLM_NCCL_SO_PATH names the library to use"
        )
    return ""


def _version(path: str) -> str:
    number = ctypes.c_int()
    try:
        ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return "unknown"
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
