"""Transport `nccl`: GPUs and hosts. A packed broadcast over a communicator with abortable waits.

Threads poll NCCL, with a deadline, and queue nothing behind an unfinished broadcast: a dead peer leaves no
stream stuck. Members synchronize on the host before each broadcast: a kernel that waits for a peer occupies
SMs that the model needs.

NCCL forms a communicator in one call that cannot be aborted. A separate thread makes it, and is abandoned at
the deadline; a late communicator is aborted.
"""

import ctypes
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch.distributed import PrefixStore, Store
from vllm import envs
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.distributed.utils import StatelessProcessGroup
from vllm.utils.nccl import find_nccl_library, unpinned_nccl_env

from deployments.protocol.errors import TransferFailed
from deployments.weights.transports.broadcast import (
    BUFFERS,
    BroadcastReceiver,
    BroadcastSender,
    BroadcastTrainerInitInfo,
)
from deployments.weights.transports.kept_chunks import KeptChunks
from deployments.weights.transports.registry import TRANSPORTS, KeepPublished
from deployments.weights.transports.rendezvous import (
    Check,
    RendezvousInfo,
    RollCall,
    on_store_thread,
    rendezvous,
)
from deployments.weights.wire import delta_cuda

MINIMUM_NCCL = (2, 29, 7)
_CREATION_POLL_S = 0.01
_OF_THE_DEVICE = (torch.OutOfMemoryError, torch.AcceleratorError)

Create = Callable[[type[PyNcclCommunicator]], PyNcclCommunicator]
Answer = TypeVar("Answer")
_Asked = tuple[Callable[[Store], Any], Future[Any]]


def create_in_time(
    create: Create, info: RendezvousInfo, rank: int, roll_call: RollCall, check: Check
) -> PyNcclCommunicator:
    """Form the communicator, once all have joined. Raises ValueError (vLLM has disabled it) or TransferFailed
    (not in time)."""
    attempt = _Attempt(create)
    try:
        # Not on the thread, which may never return.
        with unpinned_nccl_env():
            threading.Thread(target=attempt.run, name="nccl-creation", daemon=True).start()
            problem = _wait(attempt, info.timeout_s, roll_call, check)
    except BaseException:  # the communicator will not be used
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
    roll_call.finished(0)  # stop listening until the first broadcast
    return attempt.outcome.result()


def _wait(attempt: "_Attempt", timeout_s: float, roll_call: RollCall, check: Check) -> str:
    deadline = time.monotonic() + timeout_s
    while not wait([attempt.outcome], _CREATION_POLL_S).done:
        check()
        if time.monotonic() > deadline:
            return f"no progress in {timeout_s:g} s"
        if roll_call.is_called():
            return "it failed at another member first"
    return attempt.problem()


class _Attempt:
    def __init__(self, create: Create) -> None:
        self.outcome: Future[PyNcclCommunicator] = Future()
        self._create = create
        self._lock = threading.Lock()
        self._abandoned = False
        self._communicator: PyNcclCommunicator | None = None

    def run(self) -> None:
        try:
            communicator = self._create(_announcing(self))
            self.made(communicator)
        except Exception as error:  # raised or reported by the thread that waits
            self.abandon()
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(communicator)

    def made(self, communicator: PyNcclCommunicator) -> None:
        """NCCL has returned; its first collective may follow."""
        with self._lock:
            known, self._communicator = self._communicator, communicator
            abandoned = self._abandoned
        if abandoned:
            if known is None:  # else `abandon` has aborted it
                communicator.destroy()
            raise TransferFailed("the communicator came too late and was aborted")

    def abandon(self) -> None:
        """Abort the communicator now, which ends its first collective, or once it exists."""
        with self._lock:
            first, self._abandoned = not self._abandoned, True
            communicator = self._communicator
        if first and communicator is not None:
            communicator.destroy()  # ncclCommAbort, given up after 5 s

    def problem(self) -> str:
        """Why NCCL has not formed the group. Empty: it has, or something else failed."""
        error = self.outcome.exception()
        # NCCL_CHECK has no finer class. A device fault is not a peer's fault.
        if not isinstance(error, RuntimeError) or isinstance(error, _OF_THE_DEVICE):
            return ""
        return str(error).partition("\n")[0] or repr(error)


def _announcing(attempt: _Attempt) -> type[PyNcclCommunicator]:
    """vLLM's communicator, announced before its first collective, which a dead peer may block."""

    class Announcing(PyNcclCommunicator):
        def all_reduce(self, *args: Any, **kwargs: Any) -> Any:  # vLLM makes one in the constructor
            attempt.made(self)
            return super().all_reduce(*args, **kwargs)

    return Announcing


def rendezvous_with_nccl(info: RendezvousInfo, rank: int, check: Check) -> PrefixStore:
    """Raises ValueError, naming members whose NCCL does not work, or TransferFailed."""
    store, problems = rendezvous(info, rank, check, payload=nccl_problem())
    raise_problems(dict(enumerate(problems)))
    return store


def raise_problems(problems: dict[int, str]) -> None:
    found = [f"rank {rank}: {problem}" for rank, problem in problems.items() if problem]
    if found:
        raise ValueError(f"transport 'nccl' does not work; {'; '.join(found)}")


def by_store(store: PrefixStore, world_size: int, rank: int, device: torch.device) -> Create:
    def create(kind: type[PyNcclCommunicator]) -> PyNcclCommunicator:
        group = StatelessProcessGroup(rank=rank, world_size=world_size, store=store)
        with _own_stream(device):
            return _enabled(kind(group, device=device))

    return create


def by_unique_id(unique_id: bytes, world_size: int, rank: int, device: torch.device) -> Create:
    def create(kind: type[PyNcclCommunicator]) -> PyNcclCommunicator:
        with _own_stream(device):
            return _enabled(kind.from_unique_id_bytes(unique_id, rank, world_size, device))

    return create


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def _enabled(communicator: PyNcclCommunicator) -> PyNcclCommunicator:
    # A disabled communicator's broadcast does nothing and reports success.
    if communicator.disabled or not communicator.available:
        raise ValueError("transport 'nccl' does not work: vLLM has disabled its NCCL communicator")
    return communicator


def nccl_problem() -> str:
    """Why vLLM's NCCL communicator would disable itself; empty: it would not."""
    if envs.VLLM_DISABLE_PYNCCL:
        return "VLLM_DISABLE_PYNCCL is set"
    path = "libnccl"
    try:
        path = find_nccl_library()
        NCCLLibrary(path)
    except Exception as error:  # the loader has no error class of its own
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


_POLL_S = 0.0001
_ANSWER_S = 0.01
_CALL_S = 0.2  # an abort waits this long for a call in progress
_STARTED = "started"  # broadcasts that members have started, summed
_READY = "ready"  # rounds of differences that members were ready for, summed
_WATCH_S = 0.25
_WARM_UP_BYTES = 4 << 20


class NcclGroup:
    """A communicator with its own stream, two buffers and abortable waits. Raises ValueError (NCCL does not
    work) or TransferFailed (a member did not join)."""

    is_async: ClassVar[bool] = True
    kept: KeptChunks | None = None

    def __init__(self, info: RendezvousInfo, rank: int, device: torch.device, check: Check) -> None:
        self._timeout_s = info.timeout_s
        self._device = device
        self._rank, self._world_size = rank, info.world_size
        self._started = self._ready = self._told = 0
        self._store, create = self.meet(info, rank, device, check)
        self._asked: SimpleQueue[_Asked | None] = SimpleQueue()
        end = partial(self._asked.put, None)
        weakref.finalize(self, end)
        on_store_thread("nccl-store", partial(_answer, self._store, self._asked), end)
        self._roll_call = RollCall(self._store, rank, info.world_size)
        self._communicator: PyNcclCommunicator | None
        self._communicator = create_in_time(create, info, rank, self._roll_call, check)
        self._stream = torch.cuda.Stream(device)
        # An allocation during a broadcast may make the driver wait for all streams.
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self._done = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._passing: list[list[torch.Tensor]] = [[] for _ in range(BUFFERS)]
        self._calling = threading.Lock()
        self._call_deadline = math.inf
        # One for all calls: a thread takes as long to start as a call.
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="nccl-watchdog", daemon=True).start()
        try:
            self.warm_up(check)
            if info.keeps:
                delta_cuda.warm_up(device)
        except BaseException:  # nobody else can abort it yet: a kernel would wait for a peer
            self.abort()
            raise

    def meet(
        self, info: RendezvousInfo, rank: int, device: torch.device, check: Check
    ) -> tuple[PrefixStore, Create]:
        store = rendezvous_with_nccl(info, rank, check)
        return store, by_store(store, info.world_size, rank, device)

    def warm_up(self, check: Check) -> None:
        """Make NCCL connect now, while all members live."""
        self.reserve(_WARM_UP_BYTES)
        self.start(0, [self.buffer(0, _WARM_UP_BYTES)], check)
        self.wait(0, check)

    @property
    def counted(self) -> int:
        return self._world_size

    def reserve(self, size_bytes: int) -> None:
        if self._buffers[0].numel() < size_bytes:
            self._buffers = []  # free the smaller ones first
            self._buffers = [
                torch.empty(size_bytes, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)
            ]

    def buffer(self, index: int, size_bytes: int) -> torch.Tensor:
        return self._buffers[index % BUFFERS][:size_bytes]

    def agree(self, ready: bool, check: Check = lambda: None) -> bool:
        self._ask(lambda store: store.add(_READY, int(ready)), check)
        self._assemble(check)
        before, self._ready = self._ready, self._ask(lambda store: store.add(_READY, 0), check)
        return self._ready - before == self._world_size

    def _assemble(self, check: Check) -> None:
        """Wait until all members are here."""
        self._started += 1
        # One sum for all broadcasts: no member adds for the next before all have added for this one.
        needed = self._started * self.counted
        once = iter([1])
        self._ask(lambda store: store.add(_STARTED, next(once, 0)) >= needed or None, check)

    def start(self, index: int, parts: Iterable[torch.Tensor], check: Check = lambda: None) -> None:
        self._assemble(check)
        passing = self._passing[index % BUFFERS] = []  # must not be allocated again meanwhile
        try:
            for part in parts:
                passing.append(part)
                if part.is_cuda:
                    self._broadcast(part)
                else:
                    self._tell(part, check)
            self._done[index % BUFFERS].record(self._stream)
        except RuntimeError as error:  # NCCL_CHECK has no finer class
            missing = self._roll_call.missing(self._started, check)
            raise TransferFailed(f"the transfer group failed: {error}", missing) from error

    def _broadcast(self, part: torch.Tensor) -> None:
        # NCCL may block on a dead peer: the watchdog ends that.
        self._call_deadline = time.monotonic() + self._timeout_s
        try:
            with self._calling:
                communicator = self._communicator
                if communicator is None:
                    raise TransferFailed("the transfer group was aborted")
                self._stream.wait_stream(torch.cuda.current_stream())
                communicator.broadcast(part, src=0, stream=self._stream)
        finally:
            self._call_deadline = math.inf

    def wait(self, index: int, check: Check = lambda: None) -> None:
        done = self._done[index % BUFFERS]
        self._wait_until(done.query, check)
        torch.cuda.current_stream().wait_event(done)

    def finish(self) -> None:
        self._passing = [[] for _ in range(BUFFERS)]
        self._roll_call.finished(self._started)

    def _tell(self, part: torch.Tensor, check: Check) -> None:
        self._told += 1
        key = f"told/{self._told}"
        if self._rank == 0:
            self._store.set(key, part.numpy().tobytes().hex())
            self._store.delete_key(f"told/{self._told - 1}")  # all have read it
        else:
            told = self._ask(lambda store: store.get(key) if store.check([key]) else None, check)
            part.copy_(torch.frombuffer(bytearray.fromhex(told.decode()), dtype=torch.uint8))

    def _ask(self, question: Callable[[Store], Answer | None], check: Check) -> Answer:
        """Repeat a question until it has an answer."""
        answer: Future[Answer] = Future()
        self._asked.put((question, answer))
        try:
            self._wait_until(partial(_is_answered, answer), check)
            return answer.result()
        finally:
            answer.cancel()

    def _wait_until(self, reached: Callable[[], bool], check: Check) -> None:
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
        if self._communicator is None:  # aborted: the kernel ended without the bytes
            raise TransferFailed("the transfer group was aborted")

    def _fail(self, problem: str, check: Check) -> NoReturn:
        self.abort()
        missing = self._roll_call.missing(self._started, check)
        raise TransferFailed(f"the transfer group failed: {problem}", missing)

    def abort(self) -> None:
        acquired = self._calling.acquire(timeout=_CALL_S)
        try:
            communicator, self._communicator = self._communicator, None
            if communicator is not None:
                communicator.destroy()  # ncclCommAbort, given up after 5 s
        finally:
            if acquired:
                self._calling.release()


def _answer(store: Store, asked: "SimpleQueue[_Asked | None]") -> None:
    """On a thread that does not keep the group alive: a call blocks as long as the store's host hangs."""
    while (each := asked.get()) is not None:
        question, answer = each
        with suppress(InvalidStateError):  # cancelled during the call
            try:
                while not answer.done() and asked.empty():
                    if (found := question(store)) is not None:
                        answer.set_result(found)
                    else:
                        time.sleep(_POLL_S)
            except RuntimeError as error:  # torch has no finer class
                problem = f"the transfer group failed: its store is unreachable: {error}"
                answer.set_exception(TransferFailed(problem))


def _is_answered(answer: Future[Any]) -> bool:
    with suppress(TimeoutError):
        answer.exception(_ANSWER_S)
        return True
    return False


def _watch(group: "weakref.ref[NcclGroup]") -> None:
    while (watched := group()) is not None and watched._communicator is not None:
        if time.monotonic() > watched._call_deadline:
            watched.abort()
        del watched  # this thread must not keep a dropped group alive
        time.sleep(_WATCH_S)


@dataclass
class NcclTrainerInitInfo(BroadcastTrainerInitInfo):
    backend: ClassVar[str] = "slipstream_nccl"

    chunk_bytes: int = TRANSPORTS["nccl"].chunk_bytes
    keep_published: KeepPublished | None = None


def on_current_device(info: RendezvousInfo, rank: int, check: Check) -> NcclGroup:
    return NcclGroup(info, rank, torch.device("cuda", torch.cuda.current_device()), check)


class NcclWeightTransferEngine(BroadcastReceiver):
    make_group = staticmethod(on_current_device)


class NcclTrainerWeightTransferEngine(BroadcastSender[NcclTrainerInitInfo]):
    init_info_cls = NcclTrainerInitInfo
    make_group = staticmethod(on_current_device)

    def keeps(self, init_info: NcclTrainerInitInfo) -> bool:
        return init_info.keep_published is not None

    def connect(self, init_info: NcclTrainerInitInfo) -> None:
        super().connect(init_info)
        if isinstance(self._group, NcclGroup) and self.keeps(init_info):
            in_host_memory = init_info.keep_published is KeepPublished.HOST
            self._group.kept = KeptChunks(in_host_memory=in_host_memory)
