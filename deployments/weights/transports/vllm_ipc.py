"""vLLM's own `ipc` trainer engine, received into the staging while the engine decodes (`wire: vllm`).

    not packed    one call with a handle for each tensor; the trainer keeps them until the update has finished
    packed        a call for each piece, all with the handle of one buffer, which the trainer then overwrites

Each call copies what it brought before it returns: the trainer gets its memory back after the last one.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing import reductions
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import PackedBufferImporter

from deployments.weights.staging.staged_update import StagedUpdate
from deployments.weights.staging.transfer_engine import StagedWeightTransferEngine, wait_for
from deployments.weights.transports.ipc_channel import gpu_uuid
from deployments.weights.transports.registry import TRANSPORTS
from deployments.weights.transports.vllm_packing import (
    one_piece,
    received_block,
    received_tensors,
    separate_tensors,
)
from deployments.weights.wire.chunk_layout import Chunk, Entry, ReceivedChunk
from deployments.weights.wire.cuda_ipc_handles import decode_payload

_DEVICE = 6  # a handle's index of the sender's device index
Handle = tuple[Any, ...]


class StagedIpcEngine(StagedWeightTransferEngine[IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo]):
    init_info_cls = IPCWeightTransferInitInfo
    update_info_cls = IPCWeightTransferUpdateInfo

    _packed: bool | None = None  # None: not connected

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._importer = PackedBufferImporter()
        super().__init__(*args, **kwargs)

    def connect(self, init_info: IPCWeightTransferInitInfo) -> None:
        self._close()
        self._packed = init_info.packed
        self.one_payload = not init_info.packed

    def parse_update_info(self, update_dict: dict[str, Any]) -> IPCWeightTransferUpdateInfo:
        if update_dict.get("ipc_handles_pickled") is not None:
            raise ValueError(
                "ipc_handles_pickled: a worker does not unpickle; send them through the fleet's routes"
            )
        return super().parse_update_info(decode_payload(update_dict))

    def receive(self, update_info: IPCWeightTransferUpdateInfo) -> Iterator[ReceivedChunk]:
        if self._packed is None:
            raise ValueError("no connection: call init_weight_transfer_engine before update_weights")
        described = update_info.names, update_info.dtype_names, update_info.shapes
        try:
            if self._packed:
                yield from self._receive_packed(update_info, *one_piece(*described))
            else:
                chunks = separate_tensors(*described, TRANSPORTS["ipc"].chunk_bytes)
                handles = iter(self._handles(update_info.ipc_handles))
                for chunk in chunks:
                    tensors = [self._open(entry, next(handles)) for entry in chunk.entries]
                    yield received_tensors(chunk, tensors)
                    del tensors
        finally:
            self._copied()
            if not self._packed:
                self.staging.release()

    def _receive_packed(
        self, update_info: IPCWeightTransferUpdateInfo, *pieces: Chunk
    ) -> Iterator[ReceivedChunk]:
        for piece in pieces:  # one, or none
            sizes = [entry.size_bytes for entry in piece.entries]
            if update_info.tensor_sizes != sizes:
                raise ValueError(
                    f"tensor_sizes: expected {sizes[:8]}, got {str(update_info.tensor_sizes)[:80]}"
                )
            (handle,) = self._handles([update_info.ipc_handles])
            buffer = self._rebuilt("the packed buffer", handle, self._importer.rebuild)
            if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.numel() < piece.size_bytes:
                raise ValueError(
                    f"the packed buffer: expected {piece.size_bytes} bytes, "
                    f"got {buffer.dtype} {list(buffer.shape)}"
                )
            yield received_block(piece, buffer[: piece.size_bytes])

    def _handles(self, by_gpu: Any) -> list[Handle]:
        gpu = self.gpu()
        if not isinstance(by_gpu, list) or not all(isinstance(each, dict) for each in by_gpu):
            packed = "packed" if self._packed else "not packed"
            raise ValueError(f"ipc_handles do not fit a connection that is {packed}")
        without = next((each for each in by_gpu if gpu not in each), None)
        if without is not None:
            raise ValueError(
                f"this worker is on GPU {gpu}, and the trainer's handles are of {sorted(without)}"
            )
        return [each[gpu] for each in by_gpu]

    def gpu(self) -> str:
        return gpu_uuid(self.device)

    def _open(self, entry: Entry, handle: Handle) -> torch.Tensor:
        tensor = self._rebuilt(repr(entry.name), handle, lambda parts: reductions.rebuild_cuda_tensor(*parts))
        if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
            raise ValueError(
                f"{entry.name!r} was announced as {entry.dtype} {list(entry.shape)}, and its handle is of "
                f"{tensor.dtype} {list(tensor.shape)}"
            )
        return tensor.contiguous()

    def _rebuilt(self, what: str, handle: Handle, rebuild: Any) -> torch.Tensor:
        parts = list(handle)
        parts[_DEVICE] = self.device.index
        try:
            tensor: torch.Tensor = rebuild(parts)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{what}: the CUDA IPC handle cannot be opened: {error}") from error
        return tensor

    def _finalize(self, update: StagedUpdate) -> None:
        try:
            super()._finalize(update)
        finally:
            self._close()

    def _drop_staging(self) -> None:
        super()._drop_staging()
        self._close()

    def shutdown(self) -> None:
        super().shutdown()
        self._packed = None

    def _copied(self) -> None:
        if self._stream is not None:
            wait_for(self._stream.record_event())

    def _close(self) -> None:
        self._copied()
        self.staging.release()
        self._importer.close()
