"""What the transports that broadcast over a group of ranks (`gloo`, `nccl`) have in common.

Rank 0 is the publisher; each replica's workers have a range of ranks of their own, given by the ledger.
A group belongs to one membership: a lost peer breaks it for everybody, and it is never used again.
"""

import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

from torch.distributed import PrefixStore, TCPStore
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deployments.errors import TransferFailed
from deployments.weights.staging.engine import StagedWeightTransferEngine
from deployments.weights.transports.sender import OnePayloadEngine
from deployments.weights.wire.chunk_layout import Chunk, DescribedTensors, describe

_LOOK_S = 0.01
_KNOCK_S = 1.0


@dataclass(kw_only=True)
class MeetingInfo(DescribedTensors, WeightTransferInitInfo):
    """Where the group meets, and the parameters that both sides must agree on: the sender's."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float


@dataclass
class BroadcastInfo(WeightTransferUpdateInfo):
    """Nothing: what comes was described when the group was formed."""


def meet(
    info: MeetingInfo, rank: int, check: Callable[[], None], word: str = ""
) -> tuple[PrefixStore, list[str]]:
    """Wait until all members have come to the meeting point, which rank 0 opens.

    torch's own ways to form a group wait for the members too, and nothing ends that wait. Nobody is missing
    when they are called after this.

    Args:
        check: raises when there is nothing to wait for any more.
        word: what this member tells the others.

    Returns:
        The store that the members share, and the word of each, by rank.

    Raises:
        TransferFailed: not all came within `timeout_s`.
    """
    deadline = time.monotonic() + info.timeout_s

    def wait_for(reached: Callable[[], bool], what: str) -> None:
        while not reached():
            check()
            if time.monotonic() > deadline:
                raise _absence(info, what)
            time.sleep(_LOOK_S)

    if rank != 0:
        wait_for(lambda: _answers(info), "nobody has opened the meeting point")
    try:
        timeout = timedelta(seconds=info.timeout_s)
        store = TCPStore(
            info.master_address, info.master_port, info.world_size, rank == 0, timeout, wait_for_workers=False
        )
        meeting = PrefixStore("slipstream", store)
        places = [f"member/{peer}" for peer in range(info.world_size)]
        meeting.set(places[rank], word)
        wait_for(lambda: bool(meeting.check(places)), "not all of them came")
        return meeting, [meeting.get(place).decode() for place in places]
    except RuntimeError as error:  # torch has no finer class
        raise _absence(info, str(error).splitlines()[0]) from error


def _answers(info: MeetingInfo) -> bool:
    try:
        socket.create_connection((info.master_address, info.master_port), timeout=_KNOCK_S).close()
    except OSError:
        return False
    return True


def _absence(info: MeetingInfo, what: str) -> TransferFailed:
    return TransferFailed(
        f"{info.world_size} members were expected at {info.master_address}:{info.master_port} within "
        f"{info.timeout_s:g} s: {what}"
    )


class Abortable(Protocol):
    def abort(self) -> None: ...


Group = TypeVar("Group", bound=Abortable)
Init = TypeVar("Init", bound=TrainerInitInfo)


class BroadcastReceiver(StagedWeightTransferEngine[MeetingInfo, BroadcastInfo], Generic[Group]):
    init_info_cls = MeetingInfo
    update_info_cls = BroadcastInfo

    _group: Group | None = None
    _chunks: tuple[Chunk, ...] = ()
    _given_up = threading.Event()  # the connection that is being made; each has its own

    @abstractmethod
    def join(self, info: MeetingInfo, rank: int, check: Callable[[], None]) -> Group:
        """Become a member; waits for the others.

        Args:
            check: raises when there is nothing to wait for any more; called now and then.
        """

    def init_transfer_engine(self, init_info: MeetingInfo) -> None:
        self._given_up.set()
        # On the engine's thread, where `abort` is called as well: it cannot miss a connection that is queued.
        self._given_up = threading.Event()
        super().init_transfer_engine(init_info)

    def connect(self, init_info: MeetingInfo) -> None:
        given_up = self._given_up

        def check() -> None:
            if given_up.is_set():
                raise TransferFailed("the connection was given up")

        self._leave()
        self._chunks = init_info.chunks()
        self._group = self.join(init_info, init_info.rank_offset + self.worker_index, check)

    def expected(self) -> tuple[Group, tuple[Chunk, ...]]:
        """The group, and the chunks that will come over it."""
        if self._group is None:
            raise ValueError("no transfer group: call init_weight_transfer_engine before update_weights")
        return self._group, self._chunks

    def abort(self) -> None:
        self._given_up.set()
        self._leave()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class BroadcastSender(OnePayloadEngine[Init], Generic[Init, Group]):
    _group: Group | None = None

    @abstractmethod
    def form(self, info: MeetingInfo, check: Callable[[], None]) -> Group:
        """Open the meeting point and become rank 0; waits for the others.

        Args:
            check: raises when there is nothing to wait for any more; called now and then.
        """

    @property
    def group(self) -> Group:
        if self._group is None:
            raise TransferFailed("the transfer group is gone: connect again")
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
            **describe(self.packer.metadata),
        )
        calls = ThreadPoolExecutor(max_workers=1)
        try:
            meeting = calls.submit(self.client.init_weight_transfer_engine, asdict(info))
            try:
                self._group = self.form(info, lambda: raise_if_failed(meeting))
            except TransferFailed:
                meeting.result()  # the fleet knows who did not come
                raise
            meeting.result()
        finally:
            calls.shutdown(wait=False)

    def fits(self) -> bool:
        return self._group is not None or not self.is_sender

    def send(self, receiving: Future[None] | None) -> None:
        """When the group breaks, the fleet knows who is gone, and whether the others have everything."""

        try:
            self.broadcast(lambda: raise_if_failed(receiving))
        except TransferFailed:
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


def raise_if_failed(call: Future[None] | None) -> None:
    """The fleet refused, or has given up for a member that is gone: nobody waits for the sender."""
    if call is not None and call.done():
        call.result()
