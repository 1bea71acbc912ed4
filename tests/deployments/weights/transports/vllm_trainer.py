"""vLLM's own trainer engines, unchanged, on a machine without a GPU, and workers that receive what they send.

What is replaced is the device: torch's CUDA calls (nothing to wait for), CUDA IPC (a table of this process's
memory) and NCCL (Gloo). Engines, packing, rendezvous, control calls and pickled handles are vLLM's.
"""

import ctypes
import gc
import json
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo
from torch.multiprocessing import reductions
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
from vllm.distributed.weight_transfer import ipc_engine, nccl_common, nccl_engine, packed_tensor
from vllm.distributed.weight_transfer.clients import _json_safe_update_payload

from app.http.ipc_handles import refuse_or_restrict
from deployments.protocol.errors import TransferFailed
from deployments.weights.staging.base import Tensors
from deployments.weights.staging.host import HostStaging
from deployments.weights.staging.staged_update import StagedUpdate
from deployments.weights.staging.transfer_engine import StagedWeightTransferEngine
from deployments.weights.store.version_writer import RetainedVersions
from deployments.weights.transports.gloo import _from_rank_0, _wait_abandoned, create_process_group
from deployments.weights.transports.rendezvous import RendezvousInfo, meet
from deployments.weights.transports.vllm_ipc import StagedIpcEngine
from deployments.weights.transports.vllm_nccl import StagedNcclEngine, VllmMeeting
from deployments.weights.wire.chunk_layout import Chunk, ReceivedChunk
from tests.deployments.weights.transports.transport_fleet import Fleet, Receiver, worker_config

GPU = "GPU-0"
TIMEOUT_S = 4.0
STALE = 0xFF  # what a buffer holds until its broadcast has arrived: NaN, in every dtype that has one


# -- the device ------------------------------------------------------------------------------------


class _Stream:
    def __init__(self, device: int = 0) -> None:
        pass

    def synchronize(self) -> None:
        pass


class CpuTorch:
    """torch, for vLLM's trainer engines: its CUDA calls find a device on which all work is done at once."""

    cuda = SimpleNamespace(
        Stream=_Stream,
        stream=lambda stream: nullcontext(),
        current_stream=_Stream,
        is_available=lambda: False,
        ipc_collect=lambda: None,
        synchronize=lambda: None,
        get_device_properties=lambda index: SimpleNamespace(uuid=GPU),
    )
    accelerator = SimpleNamespace(
        current_device_index=lambda: 0,
        current_stream=_Stream,
        is_available=lambda: False,
        synchronize=lambda: None,
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, device: object = None, **options: Any) -> torch.Tensor:
        return torch.empty(*size, **options)


class SharedMemory:
    """CUDA IPC within one process: handles of `reduce_tensor`, and who has opened them."""

    def __init__(self) -> None:
        self._exported: dict[bytes, torch.Tensor] = {}
        self._opened: list[weakref.ref[torch.Tensor]] = []

    def export(self, tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        memory = b"handle-%058d" % len(self._exported)
        self._exported[memory] = tensor
        size_bytes = tensor.untyped_storage().nbytes()
        parts = (
            *(torch.Tensor, tensor.shape, tensor.stride(), tensor.storage_offset()),
            *(torch.storage.TypedStorage, tensor.dtype, 0, memory, size_bytes, 0, False),
            *(b"counter", 0, b"event", True),
        )
        return reductions.rebuild_cuda_tensor, parts

    def open(self, *parts: Any) -> torch.Tensor:
        if parts[7] not in self._exported:
            raise RuntimeError("invalid resource handle")
        exported = self._exported[parts[7]]
        opened = exported.view(exported.dtype).as_strided(parts[1], parts[2], parts[3])
        self._opened.append(weakref.ref(opened))
        return opened

    def users(self) -> int:
        """How many tensors of the exported memory are still referred to."""
        gc.collect()
        return sum(each() is not None for each in self._opened)


class GlooCommunicator:
    """vLLM's `PyNcclCommunicator` on the trainer's side. As NCCL's, it makes no broadcast of nothing."""

    available, disabled = True, False
    device = torch.device("cpu")

    def __init__(self, group: Any, device: Any) -> None:
        identity = ncclUniqueId()
        ctypes.memmove(identity.internal, bytes(range(128)), 128)
        group.broadcast_obj(identity, src=0)
        self.group = group
        self._gloo = gloo_group(PrefixStore("slipstream", group.store), group.rank, group.world_size)
        self.broadcasts = 0  # that have ended
        self.before: dict[int, threading.Event] = {}  # broadcasts that wait for it

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        held = self.before.get(self.broadcasts)
        if held is not None:
            held.wait(5 * TIMEOUT_S)
        if tensor.numel():
            self._gloo.broadcast([tensor.detach().view(-1).view(torch.uint8)], _from_rank_0()).wait()
        self.broadcasts += 1

    def destroy(self) -> None:
        pass


def gloo_group(store: PrefixStore, rank: int, world_size: int) -> ProcessGroupGloo:
    info = SimpleNamespace(master_address="127.0.0.1", timeout_s=3 * TIMEOUT_S)
    return create_process_group(PrefixStore("gloo", store), info, rank, world_size)  # type: ignore[arg-type]


class GlooWireGroup:
    """`VllmNcclGroup` without NCCL: two buffers, and broadcasts that arrive at any time until `wait`."""

    def __init__(self, info: RendezvousInfo, rank: int, check: Any) -> None:
        meeting = VllmMeeting(info, rank, "")
        store = meet(meeting, check)
        assert meeting.unique_id == bytes(range(128))
        self._gloo: ProcessGroupGloo | None = gloo_group(store, rank, info.world_size)
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._works: dict[int, list[Any]] = {}
        self.finished = 0
        self._timeout_s = info.timeout_s

    @property
    def idle(self) -> bool:
        """Whether no broadcast is queued."""
        return not self._works

    def reserve(self, size_bytes: int) -> None:
        if self._buffers[0].numel() < size_bytes:
            self._buffers = [torch.empty(size_bytes, dtype=torch.uint8) for _ in range(2)]

    def buffer(self, index: int, size_bytes: int) -> torch.Tensor:
        return self._buffers[index % 2][:size_bytes]

    def start(self, index: int, parts: Sequence[torch.Tensor], check: Any = None) -> None:
        assert index - 2 not in self._works, "its buffer was not taken yet"
        if self._gloo is None:
            raise TransferFailed("the transfer group was aborted")
        self._buffers[index % 2].fill_(STALE)
        self._works[index] = [
            self._gloo.broadcast([part.view(-1).view(torch.uint8)], _from_rank_0()) for part in parts
        ]

    def wait(self, index: int, check: Any = None) -> None:
        waited = 0.0
        for work in self._works[index]:
            while not work.is_completed():
                if self._gloo is None:
                    raise TransferFailed("the transfer group was aborted")
                if waited > self._timeout_s:
                    raise TransferFailed(f"the transfer group failed: no progress in {self._timeout_s:g} s")
                threading.Event().wait(0.01)
                waited += 0.01
            try:
                work.wait(timedelta(seconds=1))
            except RuntimeError as error:
                raise TransferFailed(f"the transfer group failed: {error}") from error
        del self._works[index]

    def finish(self) -> None:
        self.finished += 1

    def abort(self) -> None:
        group, self._gloo = self._gloo, None
        running = list(self._works.values())  # at once: the receiving thread adds and removes
        for work in (work for works in running for work in works):
            # Gloo's destructor would wait for its thread; NCCL's abort ends the broadcast.
            threading.Thread(target=_wait_abandoned, args=(group, [work]), daemon=True).start()


# -- the workers -----------------------------------------------------------------------------------


class CopyingStaging(HostStaging):
    """Host staging whose tensors are copies, as they are where the received ones are on a GPU."""

    def add(self, chunk: Chunk, tensors: Tensors) -> None:
        super().add(chunk, [(name, tensor.clone()) for name, tensor in tensors])


class CopyingRetained(RetainedVersions):
    """The same of what is retained for the store."""

    def add(self, received: ReceivedChunk) -> None:
        tensors = received.read()
        super().add(replace(received, read=lambda: [tensor.clone() for tensor in tensors]))


class _OnCpu:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.retained = CopyingRetained()
        self.staging = CopyingStaging(self.model, self.model_config)


class CpuIpc(_OnCpu, StagedIpcEngine):
    def gpu(self) -> str:
        return GPU


class CpuNccl(_OnCpu, StagedNcclEngine):
    timeout_s = TIMEOUT_S

    def join_group(self, info: RendezvousInfo, rank: int, check: Any) -> GlooWireGroup:
        return GlooWireGroup(info, rank, check)

    def _stage_chunk(self, update: StagedUpdate, received: ReceivedChunk) -> None:
        # On a GPU it allocates and loads kernels, and each of that would wait for the trainer.
        assert self.group.idle, "a broadcast was queued before the chunk ahead of it was staged"
        super()._stage_chunk(update, received)


class VllmReceiver(Receiver):
    """One worker, whose staging receives vLLM's wire."""

    def __init__(self, wire: str, directory: str) -> None:
        kind: Any = CpuIpc if wire == "ipc" else CpuNccl
        self.engine: StagedWeightTransferEngine[Any, Any] = kind(
            SimpleNamespace(), worker_config(directory), torch.device("cpu"), torch.nn.Module()
        )


class HttpFleet(Fleet):
    """The client's side of the routes: handles are pickled by vLLM's client and read by the fleet's."""

    def update_weights(self, info: Any) -> None:
        sent = json.loads(json.dumps(_json_safe_update_payload(info)))
        super().update_weights(json.loads(json.dumps(refuse_or_restrict(sent, allowed=True))))


# -- the trainer -----------------------------------------------------------------------------------


@contextmanager
def vllm_without_a_gpu() -> Iterator[SharedMemory]:
    """Inside, vLLM's trainer engines run; the memory that they share."""
    memory, cpu = SharedMemory(), CpuTorch()
    with pytest.MonkeyPatch.context() as patch:
        for module in (ipc_engine, nccl_common, nccl_engine, packed_tensor):
            patch.setattr(module, "torch", cpu)
        for module in (ipc_engine, packed_tensor):
            patch.setattr(module, "reduce_tensor", memory.export)
        patch.setattr(reductions, "rebuild_cuda_tensor", memory.open)
        patch.setattr(pynccl, "PyNcclCommunicator", GlooCommunicator)
        packed_tensor._get_streams.cache_clear()
        yield memory
    packed_tensor._get_streams.cache_clear()
