"""Both halves of a transport that broadcasts over a group of ranks (`gloo`, `nccl`), except the group itself.

Rank 0 is the publisher; each replica's workers have a range of ranks of their own, assigned by the ledger.
A group belongs to one membership: a lost peer breaks it for all members, and it is never used again.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deployments.protocol.errors import TransferFailed
from deployments.weights.staging.transfer_engine import StagedWeightTransferEngine
from deployments.weights.transports.registry import DEFAULT_TIMEOUT_S
from deployments.weights.transports.rendezvous import RendezvousInfo
from deployments.weights.transports.sender import OnePayloadSender
from deployments.weights.wire.chunk_layout import Chunk, describe


@dataclass
class BroadcastInfo(WeightTransferUpdateInfo):
    """Empty: the tensors were described when the group was formed."""


@dataclass
class BroadcastTrainerInitInfo(TrainerInitInfo):
    """The connection of a trainer rank.

    Attributes:
        world_size: counts the publisher (rank 0) and every worker of every replica.
        chunk_bytes: each transport has its own default.
        timeout_s: of the rendezvous and of each broadcast.
    """

    backend: ClassVar[str] = "broadcast"  # vLLM wants one of every class; each transport has its own

    master_address: str
    master_port: int
    world_size: int
    chunk_bytes: int
    timeout_s: float = DEFAULT_TIMEOUT_S


class Abortable(Protocol):
    """What a group of ranks must offer here."""

    def abort(self) -> None:
        """End every wait. Any thread may call it; the group cannot be used afterwards."""


Group = TypeVar("Group", bound=Abortable)
Init = TypeVar("Init", bound=TrainerInitInfo)
WorkerInit = TypeVar("WorkerInit", bound=WeightTransferInitInfo)
Update = TypeVar("Update", bound=WeightTransferUpdateInfo)


class GroupReceiver(StagedWeightTransferEngine[WorkerInit, Update], Generic[WorkerInit, Update, Group]):
    """A worker that is a member of a group, on whichever wire."""

    _group: Group | None = None
    _aborted = threading.Event()  # of the present attempt to connect; each has its own

    @abstractmethod
    def join(self, init_info: WorkerInit, check: Callable[[], None]) -> Group:
        """Become a member; waits for the others.

        Args:
            check: raises to end the wait; called every few milliseconds.

        Raises:
            TransferFailed: a member did not join, or is gone.
        """

    def init_transfer_engine(self, init_info: WorkerInit) -> None:
        self._aborted.set()
        # On the engine's thread, where `abort` is called too: it cannot miss a connection that is queued.
        self._aborted = threading.Event()
        super().init_transfer_engine(init_info)

    def connect(self, init_info: WorkerInit) -> None:
        aborted = self._aborted

        def check() -> None:
            if aborted.is_set():
                raise TransferFailed("the connection was aborted")

        self._leave()
        self._group = self.join(init_info, check)

    @property
    def group(self) -> Group:
        """Raises ValueError if there is none."""
        if self._group is None:
            raise ValueError("no transfer group: call init_weight_transfer_engine before update_weights")
        return self._group

    def abort(self) -> None:
        self._aborted.set()
        self._leave()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class BroadcastReceiver(GroupReceiver[RendezvousInfo, BroadcastInfo, Group], Generic[Group]):
    """The base of the workers' halves."""

    init_info_cls = RendezvousInfo
    update_info_cls = BroadcastInfo

    _chunks: tuple[Chunk, ...] = ()

    def join(self, init_info: RendezvousInfo, check: Callable[[], None]) -> Group:
        self._chunks = init_info.chunks()
        return self.join_group(init_info, init_info.rank_offset + self.worker_index, check)

    @abstractmethod
    def join_group(self, info: RendezvousInfo, rank: int, check: Callable[[], None]) -> Group:
        """As `join`, with this worker's rank."""

    def group_and_chunks(self) -> tuple[Group, tuple[Chunk, ...]]:
        """The group, and the chunks of every round.

        Raises:
            ValueError: not connected.
        """
        return self.group, self._chunks


class BroadcastSender(OnePayloadSender[Init], Generic[Init, Group]):
    """The base of the trainer's halves."""

    _group: Group | None = None

    @abstractmethod
    def open_group(self, info: RendezvousInfo, check: Callable[[], None]) -> Group:
        """Open the rendezvous and become rank 0; waits for the others.

        Args:
            check: raises to end the wait; called every few milliseconds.

        Raises:
            TransferFailed: a member did not join, or is gone.
        """

    @property
    def group(self) -> Group:
        """Raises TransferFailed without a connection."""
        if self._group is None:
            raise TransferFailed("the transfer group is gone: connect again")
        return self._group

    def connect(self, init_info: Any) -> None:
        if not self.is_sender:
            return
        info = RendezvousInfo(
            master_address=init_info.master_address,
            master_port=init_info.master_port,
            rank_offset=1,
            world_size=init_info.world_size,
            chunk_bytes=init_info.chunk_bytes,
            timeout_s=init_info.timeout_s,
            **describe(self.packer.metadata),
        )
        calls = ThreadPoolExecutor(max_workers=1)
        try:
            connecting = calls.submit(self.client.init_weight_transfer_engine, asdict(info))
            try:
                self._group = self.open_group(info, lambda: raise_if_failed(connecting))
            except TransferFailed:
                connecting.result()  # the fleet's error names the members that did not join
                raise
            connecting.result()
        finally:
            calls.shutdown(wait=False)

    def is_current(self) -> bool:
        return self._group is not None or not self.is_sender

    def send(self, receiving: Future[None] | None) -> None:
        try:
            self.broadcast(lambda: raise_if_failed(receiving))
        except TransferFailed:
            # Leave the group, so that its other members stop waiting and the call ends: its result names the
            # replica that is gone, or shows that the others have received everything.
            self.shutdown()

    @abstractmethod
    def broadcast(self, check: Callable[[], None]) -> None:
        """Send all chunks.

        Args:
            check: raises when nobody receives any more; called every few milliseconds.

        Raises:
            TransferFailed: a peer is gone.
        """

    def abandon_round(self) -> None:
        self.shutdown()  # broadcasts may be queued that no receiver will join

    def shutdown(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def raise_if_failed(call: Future[None] | None) -> None:
    """Raise the error of a call to the fleet that has failed: then no receiver waits for the sender."""
    if call is not None and call.done():
        call.result()
