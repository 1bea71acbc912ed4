"""Transport `nccl`: GPUs and hosts. A packed broadcast from the publisher's GPU to every worker.

Rank 0 is the publisher; each replica's workers have a range of ranks of their own, given by the
ledger. Both sides have two buffers and a stream for NCCL:

    publisher   pack chunk i+1 (its own stream)   | broadcast chunk i (NCCL's stream)
    worker      load chunk i (the staging stream) | receive chunk i+1 (NCCL's stream)

Events order the streams on the device. A thread waits for NCCL only by polling, with a deadline,
and queues nothing behind a broadcast before it has arrived: a dead peer then leaves no stream stuck,
and its group is aborted. A group belongs to one membership; a broken one is never used again.
"""

import ctypes
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import ClassVar, Self

import torch
from torch.distributed import PrefixStore, TCPStore
from vllm import envs
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.utils.nccl import find_nccl_library, unpinned_nccl_env

from deployments.weights.gloo import BrokenGroup
from deployments.weights.packing import Chunk, describe, pack, parse, plan_chunks
from deployments.weights.staging import StagedWeightTransferEngine

DEFAULT_CHUNK_BYTES = 512 << 20
DEFAULT_TIMEOUT_S = 60.0
NEEDED_NCCL = (2, 29, 7)
_BUFFERS = 2
_POLL_S = 0.0001
_CALL_S = 0.2
_WARM_UP_BYTES = 4 << 20


@dataclass(kw_only=True)
class NcclInitInfo(WeightTransferInitInfo):
    """Where the group meets, and the parameters that both sides must agree on: the sender's."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    timeout_s: float = DEFAULT_TIMEOUT_S


@dataclass
class NcclUpdateInfo(WeightTransferUpdateInfo):
    """All tensors of the broadcast that is about to start, in the order in which they come."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


@dataclass
class NcclTrainerInitInfo(TrainerInitInfo):
    """`world_size` counts the publisher (rank 0) and every worker of every replica."""

    backend: ClassVar[str] = "slipstream_nccl"

    master_address: str
    master_port: int
    world_size: int
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    timeout_s: float = DEFAULT_TIMEOUT_S


class TransferGroup:
    """A communicator with a stream of its own, two buffers, and a way out of a wait.

    Raises:
        ValueError: NCCL is disabled here or at a peer.
        BrokenGroup: a member did not come, or is gone.
    """

    def __init__(self, info: NcclInitInfo, rank: int, device: torch.device) -> None:
        self._timeout_s = info.timeout_s
        self._device = device
        self._communicator: PyNcclCommunicator | None = form_communicator(info, rank, device)
        self._stream = torch.cuda.Stream(device)
        # Taken once: an allocation during a broadcast may make the driver wait for all streams.
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(_BUFFERS)]
        self._done = [torch.cuda.Event() for _ in range(_BUFFERS)]
        self._calling = threading.Lock()
        # NCCL connects lazily: with everybody present now, not in the first round with a peer that died.
        self.reserve(_WARM_UP_BYTES)
        self.start(0, _WARM_UP_BYTES)
        self.wait(0)

    def reserve(self, size_bytes: int) -> None:
        if self._buffers[0].numel() < size_bytes:
            self._buffers = []
            self._buffers = [
                torch.empty(size_bytes, dtype=torch.uint8, device=self._device) for _ in range(_BUFFERS)
            ]

    def buffer(self, index: int, size_bytes: int) -> torch.Tensor:
        return self._buffers[index % _BUFFERS][:size_bytes]

    def start(self, index: int, size_bytes: int) -> None:
        """Queue the broadcast of a buffer behind what the current stream has done with it."""
        # NCCL may connect to its peers inside the call and wait there for a dead one: the timer ends that.
        guard = threading.Timer(self._timeout_s, self.abort)
        guard.daemon = True
        guard.start()
        try:
            with self._calling:
                communicator = self._communicator
                if communicator is None:
                    raise BrokenGroup("the transfer group was aborted")
                self._stream.wait_stream(torch.cuda.current_stream())
                communicator.broadcast(self.buffer(index, size_bytes), src=0, stream=self._stream)
                self._done[index % _BUFFERS].record(self._stream)
        except RuntimeError as error:  # NCCL_CHECK has no finer class
            raise BrokenGroup(f"the transfer group broke: {error}") from error
        finally:
            guard.cancel()

    def wait(self, index: int) -> None:
        """Until the buffer's broadcast is through; the current stream may then use the buffer."""
        done, deadline = self._done[index % _BUFFERS], time.monotonic() + self._timeout_s
        while not done.query():
            if self._communicator is None:
                raise BrokenGroup("the transfer group was aborted")
            if time.monotonic() > deadline:
                self.abort()
                raise BrokenGroup(f"the transfer group broke: no progress in {self._timeout_s:g} s")
            time.sleep(_POLL_S)
        if self._communicator is None:  # an abort also ends the kernel, without the bytes
            raise BrokenGroup("the transfer group was aborted")
        torch.cuda.current_stream().wait_event(done)

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


class NcclWeightTransferEngine(StagedWeightTransferEngine[NcclInitInfo, NcclUpdateInfo]):
    init_info_cls = NcclInitInfo
    update_info_cls = NcclUpdateInfo

    _group: TransferGroup | None = None
    _chunk_bytes = DEFAULT_CHUNK_BYTES

    def connect(self, init_info: NcclInitInfo) -> None:
        self.abort()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._chunk_bytes = init_info.chunk_bytes
        self._group = TransferGroup(init_info, rank, self.device)

    def receive(self, update_info: NcclUpdateInfo) -> Iterator[tuple[Chunk, torch.Tensor]]:
        group = self._group
        if group is None:
            raise ValueError("no transfer group: call init_weight_transfer_engine before update_weights")
        tensors = parse(update_info.names, update_info.dtype_names, update_info.shapes)
        chunks = plan_chunks(tensors, self._chunk_bytes)
        group.reserve(max((chunk.size_bytes for chunk in chunks), default=0))
        finished = False
        try:
            if chunks:
                group.start(0, chunks[0].size_bytes)
            for index, chunk in enumerate(chunks):
                if index + 1 < len(chunks):
                    # Behind the loads of chunk i-1, which had this buffer, on the current stream.
                    group.start(index + 1, chunks[index + 1].size_bytes)
                group.wait(index)
                yield chunk, group.buffer(index, chunk.size_bytes)
            finished = True
        finally:
            if not finished:  # peers wait in broadcasts that this worker will not take part in
                self.abort()

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class NcclTrainerWeightTransferEngine(TrainerWeightTransferEngine[NcclTrainerInitInfo]):
    init_info_cls = NcclTrainerInitInfo

    def __init__(
        self, *, client: VLLMWeightSyncClient, source: WeightSource, init_info: NcclTrainerInitInfo
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._chunk_bytes = init_info.chunk_bytes
        self._group: TransferGroup | None = None

    @classmethod
    def trainer_init(
        cls,
        init_info: NcclTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        if source is None:
            raise ValueError("transport 'nccl' needs a WeightSource, got None")
        engine = cls(client=client, source=source, init_info=init_info)
        if engine.is_sender:
            engine._meet(init_info)
        return engine

    def send_weights(self) -> None:
        assert self.source is not None
        tensors = iter(self.source)
        if not self.is_sender:
            for _ in tensors:  # materializing is a collective: every rank takes part
                pass
            return
        metadata = [(meta.name, meta.dtype, meta.shape) for meta in self.source.metadata()]
        self.client.start_weight_update()
        # The receivers take part in the broadcast inside this call, so the two run side by side. It
        # is never joined on an error: it ends when the fleet has given the round up.
        calls = ThreadPoolExecutor(max_workers=1)
        try:
            receiving = calls.submit(self.client.update_weights, describe(metadata))
            self._send(plan_chunks(metadata, self._chunk_bytes), tensors, receiving)
            receiving.result()
        except BaseException:  # whatever it was, the group cannot be used again
            self.shutdown()  # broadcasts may be queued that nobody will join
            raise
        finally:
            calls.shutdown(wait=False)
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _send(
        self, chunks: list[Chunk], tensors: Iterator[tuple[str, torch.Tensor]], receiving: Future[None]
    ) -> None:
        group = self._group
        if group is None:
            raise BrokenGroup("the transfer group is gone: connect again")
        group.reserve(max((chunk.size_bytes for chunk in chunks), default=0))
        for index, chunk in enumerate(chunks):
            if index >= _BUFFERS:
                group.wait(index - _BUFFERS)
            # On the caller's stream: that of the tensors, whose memory may be freed right after.
            pack(chunk, tensors, group.buffer(index, chunk.size_bytes))
            if receiving.done():
                receiving.result()  # refused before the first byte: do not wait for peers
            group.start(index, chunk.size_bytes)
        for index in range(max(len(chunks) - _BUFFERS, 0), len(chunks)):
            group.wait(index)

    def _meet(self, init_info: NcclTrainerInitInfo) -> None:
        info = NcclInitInfo(
            master_address=init_info.master_address,
            master_port=init_info.master_port,
            rank_offset=1,
            world_size=init_info.world_size,
            chunk_bytes=init_info.chunk_bytes,
            timeout_s=init_info.timeout_s,
        )
        calls = ThreadPoolExecutor(max_workers=1)
        try:
            meeting = calls.submit(self.client.init_weight_transfer_engine, asdict(info))
            device = torch.device("cuda", torch.cuda.current_device())
            self._group = TransferGroup(info, 0, device)
            meeting.result()
        finally:
            calls.shutdown(wait=False)


def form_communicator(info: NcclInitInfo, rank: int, device: torch.device) -> PyNcclCommunicator:
    """Join the group; rank 0 opens the meeting point. Waits for all members, up to `timeout_s`.

    Every member says first whether its NCCL works: one that does not would leave the others in
    ncclCommInitRank, which has no deadline and cannot be aborted from outside.
    """
    try:
        store = TCPStore(
            info.master_address,
            info.master_port,
            world_size=info.world_size,
            is_master=rank == 0,
            timeout=timedelta(seconds=info.timeout_s),
            wait_for_workers=False,
        )
        meeting = PrefixStore("slipstream", store)
        meeting.set(f"nccl/{rank}", nccl_fault())
        meeting.wait([f"nccl/{peer}" for peer in range(info.world_size)])
        faults = [meeting.get(f"nccl/{peer}").decode() for peer in range(info.world_size)]
    except RuntimeError as error:  # torch has no finer class
        raise BrokenGroup(
            f"{info.world_size} members were expected at {info.master_address}:{info.master_port} within "
            f"{info.timeout_s:g} s: {str(error).splitlines()[0]}"
        ) from error
    found = [f"rank {peer}: {fault}" for peer, fault in enumerate(faults) if fault]
    if found:
        raise ValueError(f"transport 'nccl' does not work; {'; '.join(found)}")
    group = StatelessProcessGroup(rank=rank, world_size=info.world_size, store=meeting)
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
