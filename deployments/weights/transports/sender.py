"""The trainer's half of every transport.

    prepare                 work that can be done before the replicas know of the round
    start_weight_update     every replica begins an update
    update_weights          the call inside which the replicas receive; it runs beside the sending
    transfer                packs the source's tensors and moves the bytes (the transport's own part)
    finish_weight_update    the fleet verifies and commits

After any failure `abandon_round` ends the waits of the receivers. The call that is still running is not
joined then, because it ends only when the fleet has aborted the round.
"""

from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from deployments.protocol.errors import FleetUnavailable
from deployments.weights.transports.chunk_packer import ChunkPacker

Init = TypeVar("Init", bound=TrainerInitInfo)
T = TypeVar("T")


class WeightSender(TrainerWeightTransferEngine[Init], Generic[Init]):
    """The base of all trainer halves. On every trainer rank; only rank 0, the sender, calls the fleet.

    Args:
        chunk_bytes: the size of the chunks in which tensors are sent; see `plan_chunks`.
    """

    def __init__(
        self, *, client: VLLMWeightSyncClient, source: WeightSource, is_sender: bool, chunk_bytes: int
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.packer = ChunkPacker(source, chunk_bytes)

    @classmethod
    def trainer_init(
        cls, init_info: Init, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Connect to the fleet. Called on every trainer rank.

        Raises:
            ValueError: no source, or the transport cannot work here.
            TransferFailed: a peer did not join, or rank 0 could not connect.
            Exception: what the client raises.
        """
        if source is None:
            raise ValueError(f"transport {init_info.backend!r} needs a WeightSource, got None")
        engine = cls(
            client=client, source=source, is_sender=init_info.is_sender, chunk_bytes=init_info.chunk_bytes
        )
        try:
            engine.connect(init_info)
        except BaseException:  # whatever it was: peers that have joined must not wait for the others
            engine.shutdown()
            raise
        return engine

    def send_weights(self) -> None:
        """One round. Called on every trainer rank.

        Raises:
            TransferFailed: a peer is gone, or the model's tensors have moved; connect again.
            ValueError: the source yields a tensor that its metadata did not declare.
            Exception: what the client raises.
        """
        self.packer.begin()
        self.prepare()
        if self.is_sender:
            self.client.start_weight_update()
        calls = ThreadPoolExecutor(max_workers=1)
        try:
            self.transfer(calls)
        except BaseException:  # whatever it was: the receivers must not wait for the other chunks
            self.abandon_round()
            raise
        finally:
            calls.shutdown(wait=False)
        if self.is_sender:
            self.client.finish_weight_update()

    @abstractmethod
    def connect(self, init_info: Init) -> None:
        """Agree with the replicas on how the bytes move. Called once, on every trainer rank."""

    def is_current(self) -> bool:
        """Whether the connection can send the source's tensors from where they are now."""
        return True

    def prepare(self) -> None:
        """Work that can be done before the replicas know of the round."""

    @abstractmethod
    def transfer(self, calls: ThreadPoolExecutor) -> None:
        """Send all chunks, and submit the calls inside which they are received to `calls`."""

    def join_gathers(self) -> None:
        """On a trainer rank that is not the sender: take part in the collectives of the source's pass."""
        self.packer.drain()

    def abandon_round(self) -> None:
        """End the receivers' waits for a round that will not be finished."""


class OnePayloadSender(WeightSender[Init], Generic[Init]):
    """The base of trainer halves whose rounds are one payload, received inside one call."""

    def transfer(self, calls: ThreadPoolExecutor) -> None:
        if not self.is_sender:
            self.join_gathers()
            return
        receiving = calls.submit(self.client.update_weights, self.payload())
        self.send(receiving)
        receiving.result()

    def payload(self) -> dict[str, Any]:
        """The update info of this round; the connection has described its tensors already."""
        return {}

    @abstractmethod
    def send(self, receiving: Future[None] | None) -> None:
        """Send all chunks. `receiving` is the sender's call: if it has failed, nobody receives."""


def gather_from_ranks(value: T) -> list[T]:
    """The value of every trainer rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    values = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


# What ranks that send together agree on first: which replicas to connect to, or that connections are good.
#
#     rank 0      asks the controller for the fleet's status ─┐
#     all ranks   ◄── all_gather: who is connected, and to which membership
#
# Rank 0 knows the fleet, and every rank knows its own connection. A rank that connected on its own would wait
# for the others for good. Each membership needs a new connection: a process group that lost or gained a
# member cannot be used again, and a restarted controller has no connection.


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The replicas that rank 0 found, as far as a connection depends on them."""

    epoch: int
    workers: int  # of all replicas together
    changed: bool  # since the connection was made


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankState:
    """What a rank contributes; all ranks see all of them."""

    connected: bool
    membership: Membership | None = None  # rank 0's
    problem: str | None = None  # why rank 0 has none


def agree(
    find: Callable[[], Membership] | None, *, connected: bool, together: bool = True
) -> Membership | None:
    """The membership that all ranks must connect to; None if all connections are still good.

    Args:
        find: on rank 0, asks the fleet; None on the others.
        connected: this rank has a connection, which is right for what it sends now.
        together: every rank calls this; else rank 0 alone.

    Raises:
        FleetUnavailable: rank 0 cannot send (on rank 0: whatever `find` raised).
    """
    membership, failure = None, None
    if find is not None:
        try:
            membership = find()
        except Exception as error:  # the other ranks must learn of it before it is raised
            failure = error
    problem = None if failure is None else str(failure)
    own = _RankState(connected=connected, membership=membership, problem=problem)
    ranks = gather_from_ranks(own) if together else [own]
    if failure is not None:
        raise failure
    if ranks[0].problem is not None:
        raise FleetUnavailable(f"rank 0 of the trainer cannot publish: {ranks[0].problem}")
    agreed = ranks[0].membership
    assert agreed is not None
    return agreed if agreed.changed or not all(rank.connected for rank in ranks) else None


def call_off(reason: str) -> None:
    """On rank 0, where the others wait in `agree`: it does not send, and they raise FleetUnavailable."""
    gather_from_ranks(_RankState(connected=False, problem=reason))
