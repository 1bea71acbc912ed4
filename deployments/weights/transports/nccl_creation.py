"""How a member of the group of transport `nccl` gets its communicator, with an end to every wait.

NCCL forms a communicator inside one call, which waits for all members and cannot be ended. So that call runs
in a thread of its own. Who waits for it stops at a deadline, and leaves the thread behind: it holds a socket
and a little memory. A communicator that it still returns is aborted and never used.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import PrefixStore
from vllm import envs
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.distributed.utils import StatelessProcessGroup
from vllm.utils.nccl import find_nccl_library, unpinned_nccl_env

from deployments.errors import TransferFailed
from deployments.weights.transports.rendezvous import RendezvousInfo, rendezvous
from deployments.weights.transports.roll_call import RollCall

MINIMUM_NCCL = (2, 29, 7)
_POLL_S = 0.01
_OF_THE_DEVICE = (torch.OutOfMemoryError, torch.AcceleratorError)

Create = Callable[[type[PyNcclCommunicator]], PyNcclCommunicator]  # with this class, on the calling thread


def create_in_time(
    create: Create, info: RendezvousInfo, rank: int, roll_call: RollCall, check: Callable[[], None]
) -> PyNcclCommunicator:
    """The communicator of a group whose members have all joined the rendezvous.

    Args:
        check: raises to end the wait; called every few milliseconds.

    Raises:
        ValueError: vLLM has disabled it.
        TransferFailed: a member is gone, or NCCL has not formed the group within the timeout.
    """
    attempt = _Attempt(create)
    try:
        # The environment is the process's: a thread that never returns would never restore it.
        with unpinned_nccl_env():
            threading.Thread(target=attempt.run, name="nccl-creation", daemon=True).start()
            problem = _wait(attempt, info.timeout_s, roll_call, check)
    except BaseException:  # whatever it was: nobody will use the communicator
        attempt.abandon()
        raise
    if problem:
        attempt.abandon()
        missing = roll_call.missing(0, check)
        silent = f"; ranks {list(missing)} do not answer" if missing else ""
        raise TransferFailed(
            f"the transfer group failed: rank {rank} waited for NCCL to connect all {info.world_size} "
            f"members ({info.master_address}:{info.master_port}): {problem}{silent}. Connect again; if it "
            "fails again while all members live, NCCL_SOCKET_IFNAME names the network interface to use, and "
            "NCCL_DEBUG=INFO shows what NCCL waits for",
            missing,
        )
    roll_call.finished(0)  # it need not listen until the first broadcast
    return attempt.result()


def _wait(attempt: "_Attempt", timeout_s: float, roll_call: RollCall, check: Callable[[], None]) -> str:
    """Wait for the end of an attempt; why NCCL has not formed the group, as `_Attempt.problem`."""
    deadline = time.monotonic() + timeout_s
    while not attempt.over.wait(_POLL_S):
        check()
        if time.monotonic() > deadline:
            return f"no progress in {timeout_s:g} s"
        if roll_call.is_called():
            return "it failed at another member first"
    return attempt.problem()


class _Attempt:
    """One call into NCCL, on a thread that may never return."""

    def __init__(self, create: Create) -> None:
        self.over = threading.Event()
        self._create = create
        self._lock = threading.Lock()
        self._abandoned = False
        self._communicator: PyNcclCommunicator | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self.made(self._create(_announcing(self)))
        except Exception as error:  # whatever it was: raised or reported by the thread that waits
            self._error = error
            self.abandon()
        self.over.set()

    def made(self, communicator: PyNcclCommunicator) -> None:
        """NCCL has returned it, and may use it next.

        Raises:
            TransferFailed: nobody waits for it any more; it is aborted.
        """
        with self._lock:
            known, self._communicator = self._communicator, communicator
            abandoned = self._abandoned
        if abandoned:
            if known is None:  # else `abandon` has aborted it
                communicator.destroy()
            raise TransferFailed("nobody waits for this communicator any more")

    def abandon(self) -> None:
        """Abort the communicator: now if there is one, which ends its first collective; else later."""
        with self._lock:
            first, self._abandoned = not self._abandoned, True
            communicator = self._communicator
        if first and communicator is not None:
            communicator.destroy()  # ncclCommAbort, given up after 5 s

    def problem(self) -> str:
        """Why NCCL has not formed the group; empty if it has, or if something else than NCCL failed."""
        # Neither torch's store nor NCCL_CHECK has a finer class. But a fault of the device is no peer's.
        if not isinstance(self._error, RuntimeError) or isinstance(self._error, _OF_THE_DEVICE):
            return ""
        return str(self._error).partition("\n")[0] or repr(self._error)

    def result(self) -> PyNcclCommunicator:
        """The communicator, once it is over. Raises what the attempt raised."""
        if self._error is not None:
            raise self._error
        assert self._communicator is not None
        return self._communicator


def _announcing(attempt: _Attempt) -> type[PyNcclCommunicator]:
    """vLLM's communicator, known to `attempt` before its first collective, which may wait for a dead peer."""

    class Announcing(PyNcclCommunicator):
        def all_reduce(self, *args: Any, **kwargs: Any) -> Any:  # vLLM's, when NCCL has formed the group
            attempt.made(self)
            return super().all_reduce(*args, **kwargs)

    return Announcing


def rendezvous_with_nccl(info: RendezvousInfo, rank: int, check: Callable[[], None]) -> PrefixStore:
    """`rendezvous`, in which every member reports whether its NCCL works.

    The others would wait for a member without it until the deadline, and not know why.

    Raises:
        ValueError: NCCL does not work at a member; names each.
        TransferFailed: as `rendezvous`.
    """
    store, problems = rendezvous(info, rank, check, payload=nccl_problem())
    raise_problems(dict(enumerate(problems)))
    return store


def raise_problems(problems: dict[int, str]) -> None:
    """Raise ValueError if NCCL does not work at a rank; names each."""
    found = [f"rank {rank}: {problem}" for rank, problem in problems.items() if problem]
    if found:
        raise ValueError(f"transport 'nccl' does not work; {'; '.join(found)}")


def by_store(store: PrefixStore, world_size: int, rank: int, device: torch.device) -> Create:
    """Creates a communicator whose unique id rank 0 leaves in the store."""

    def create(kind: type[PyNcclCommunicator]) -> PyNcclCommunicator:
        group = StatelessProcessGroup(rank=rank, world_size=world_size, store=store)
        with _own_stream(device):
            return _enabled(kind(group, device=device))

    return create


def by_unique_id(unique_id: bytes, world_size: int, rank: int, device: torch.device) -> Create:
    """Creates a communicator of a unique id."""

    def create(kind: type[PyNcclCommunicator]) -> PyNcclCommunicator:
        with _own_stream(device):
            return _enabled(kind.from_unique_id_bytes(unique_id, rank, world_size, device))

    return create


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """The device, which each thread has to choose, and a stream: no other work waits behind a collective."""
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def _enabled(communicator: PyNcclCommunicator) -> PyNcclCommunicator:
    """The same. Raises ValueError if vLLM has disabled it."""
    # A disabled communicator's broadcast does nothing and reports success: the fleet would serve garbage.
    if communicator.disabled or not communicator.available:
        raise ValueError("transport 'nccl' does not work: vLLM has disabled its NCCL communicator")
    return communicator


def nccl_problem() -> str:
    """Why vLLM's NCCL communicator would disable itself here; empty if it would not."""
    if envs.VLLM_DISABLE_PYNCCL:
        return "VLLM_DISABLE_PYNCCL is set"
    path = "libnccl"
    try:
        path = find_nccl_library()
        NCCLLibrary(path)
    except Exception as error:  # the loader raises whatever it is; it is reported with the advice
        minimum = ".".join(map(str, MINIMUM_NCCL))
        return (
            f"vLLM cannot use {path}, version {_version(path)}: {error}; NCCL {minimum} or newer is needed, "
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
