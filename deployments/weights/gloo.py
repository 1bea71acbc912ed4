"""Transport `gloo`: hosts without a common GPU fabric. A packed broadcast over a stateless Gloo group.

Rank 0 is the publisher; each replica's workers have a range of ranks of their own, given by the
ledger. A group belongs to one membership: a lost peer breaks it for everybody, and the next round
builds a new one.
"""

import ipaddress
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deployments.weights.packing import Chunk, describe, pack, parse, plan_chunks
from deployments.weights.staging import StagedWeightTransferEngine

DEFAULT_CHUNK_BYTES = 64 << 20
DEFAULT_TIMEOUT_S = 60.0


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """Where the group meets, and the parameters that both sides must agree on: the sender's."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    timeout_s: float = DEFAULT_TIMEOUT_S


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """All tensors of the broadcast that is about to start, in the order in which they come."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """`world_size` counts the publisher (rank 0) and every worker of every replica."""

    backend: ClassVar[str] = "gloo"

    master_address: str
    master_port: int
    world_size: int
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    timeout_s: float = DEFAULT_TIMEOUT_S


class BrokenGroup(ValueError):
    """A peer of the transfer group is gone. The replica is sound: the round must be sent again."""


class GlooWeightTransferEngine(StagedWeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    _group: ProcessGroupGloo | None = None
    _chunk_bytes = DEFAULT_CHUNK_BYTES

    def connect(self, init_info: GlooInitInfo) -> None:
        self.abort()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._chunk_bytes = init_info.chunk_bytes
        self._group = form_group(init_info, rank)

    def receive(self, update_info: GlooUpdateInfo) -> Iterator[tuple[Chunk, torch.Tensor]]:
        group = self._group
        if group is None:
            raise ValueError("no transfer group: call init_weight_transfer_engine before update_weights")
        tensors = parse(update_info.names, update_info.dtype_names, update_info.shapes)
        for chunk in plan_chunks(tensors, self._chunk_bytes):
            block = torch.empty(chunk.size_bytes, dtype=torch.uint8)
            broadcast(group, block)
            yield chunk, block

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    init_info_cls = GlooTrainerInitInfo

    def __init__(
        self, *, client: VLLMWeightSyncClient, source: WeightSource, init_info: GlooTrainerInitInfo
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._chunk_bytes = init_info.chunk_bytes
        self._group: ProcessGroupGloo | None = None

    @classmethod
    def trainer_init(
        cls,
        init_info: GlooTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        if source is None:
            raise ValueError("transport 'gloo' needs a WeightSource, got None")
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
            for chunk in plan_chunks(metadata, self._chunk_bytes):
                block = torch.empty(chunk.size_bytes, dtype=torch.uint8)
                pack(chunk, tensors, block)
                if receiving.done():
                    receiving.result()  # refused before the first byte: do not wait for peers
                assert self._group is not None
                broadcast(self._group, block)
            receiving.result()
        finally:
            calls.shutdown(wait=False)
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _meet(self, init_info: GlooTrainerInitInfo) -> None:
        worker_info = {
            "master_address": init_info.master_address,
            "master_port": init_info.master_port,
            "rank_offset": 1,
            "world_size": init_info.world_size,
            "chunk_bytes": init_info.chunk_bytes,
            "timeout_s": init_info.timeout_s,
        }
        calls = ThreadPoolExecutor(max_workers=1)
        try:
            meeting = calls.submit(self.client.init_weight_transfer_engine, worker_info)
            self._group = form_group(GlooInitInfo(**worker_info), 0)  # type: ignore[arg-type]
            meeting.result()
        finally:
            calls.shutdown(wait=False)


def form_group(info: GlooInitInfo, rank: int) -> ProcessGroupGloo:
    """Join the group; rank 0 opens the meeting point. Waits for all members, up to `timeout_s`."""
    timeout = timedelta(seconds=info.timeout_s)
    store = TCPStore(
        info.master_address,
        info.master_port,
        world_size=info.world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
    )
    options: Any = ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(info.master_address))]
    return ProcessGroupGloo(PrefixStore("slipstream", store), rank, info.world_size, options)


def broadcast(group: ProcessGroupGloo, block: torch.Tensor) -> None:
    """Send or receive one block (uint8, host memory) from rank 0.

    Raises:
        BrokenGroup: a peer is gone, or did not come within the group's timeout.
    """
    try:
        group.broadcast([block], _from_publisher()).wait()
    except RuntimeError as error:  # Gloo has no finer class
        raise BrokenGroup(f"the transfer group broke: {str(error).splitlines()[0]}") from error


def _from_publisher() -> Any:
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options


def _own_address(master_address: str) -> str:
    """The address of this host that the meeting point can reach.

    Gloo's default is whatever the host name resolves to, which in containers is often nothing.
    """
    if ipaddress.ip_address(socket.gethostbyname(master_address)).is_loopback:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master_address, 9))  # no packet is sent
        return str(probe.getsockname()[0])
