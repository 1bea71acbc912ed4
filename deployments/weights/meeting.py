"""What the transports that broadcast over a group of ranks (`gloo`, `nccl`) have in common.

Rank 0 is the publisher; each replica's workers have a range of ranks of their own, given by the ledger.
A group belongs to one membership: a lost peer breaks it for everybody, and it is never used again.
"""

from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Generic, Protocol, TypeVar

from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deployments.weights.arrival import BrokenGroup
from deployments.weights.packing import Chunk, layout
from deployments.weights.sending import OnePayloadEngine
from deployments.weights.staging import StagedWeightTransferEngine

DEFAULT_TIMEOUT_S = 60.0


@dataclass(kw_only=True)
class MeetingInfo(WeightTransferInitInfo):
    """Where the group meets, and the parameters that both sides must agree on: the sender's."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    chunk_bytes: int
    timeout_s: float


@dataclass
class BroadcastInfo(WeightTransferUpdateInfo):
    """All tensors of the broadcast that is about to start, in the order in which they come."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class Abortable(Protocol):
    def abort(self) -> None: ...


Group = TypeVar("Group", bound=Abortable)
Init = TypeVar("Init", bound=TrainerInitInfo)


class BroadcastReceiver(StagedWeightTransferEngine[MeetingInfo, BroadcastInfo], Generic[Group]):
    init_info_cls = MeetingInfo
    update_info_cls = BroadcastInfo

    _group: Group | None = None
    _chunk_bytes = 0

    @abstractmethod
    def join(self, info: MeetingInfo, rank: int) -> Group:
        """Become a member; waits for the others."""

    def connect(self, init_info: MeetingInfo) -> None:
        self.abort()
        self._chunk_bytes = init_info.chunk_bytes
        self._group = self.join(init_info, init_info.rank_offset + self.worker_index)

    def expected(self, update_info: BroadcastInfo) -> tuple[Group, tuple[Chunk, ...]]:
        """The group, and the chunks that will come over it."""
        if self._group is None:
            raise ValueError("no transfer group: call init_weight_transfer_engine before update_weights")
        chunks = layout(update_info.names, update_info.dtype_names, update_info.shapes, self._chunk_bytes)
        return self._group, chunks

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class BroadcastSender(OnePayloadEngine[Init], Generic[Init, Group]):
    _group: Group | None = None

    @abstractmethod
    def form(self, info: MeetingInfo) -> Group:
        """Open the meeting point and become rank 0; waits for the others."""

    @property
    def group(self) -> Group:
        if self._group is None:
            raise BrokenGroup("the transfer group is gone: connect again")
        return self._group

    def meet(self, init_info: Any) -> None:
        if not self.is_sender:
            return
        info = MeetingInfo(
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
            try:
                self._group = self.form(info)
            except BrokenGroup:
                meeting.result()  # the fleet knows who did not come
                raise
            meeting.result()
        finally:
            calls.shutdown(wait=False)

    def fits(self) -> bool:
        return self._group is not None or not self.is_sender

    def send(self, receiving: Future[None] | None) -> None:
        """When the group breaks, the fleet knows who is gone, and whether the others have everything."""

        def check() -> None:
            if receiving is not None and receiving.done():
                receiving.result()  # refused, or given up for a member that is gone: nobody receives

        try:
            self.broadcast(check)
        except BrokenGroup:
            self.shutdown()  # who still receives waits no longer, so that the call ends

    @abstractmethod
    def broadcast(self, check: Callable[[], None]) -> None:
        """Send all chunks.

        Args:
            check: raises when nobody receives any more; called now and then.
        """

    def give_up(self) -> None:
        self.shutdown()  # broadcasts may be queued that nobody will join

    def shutdown(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()
