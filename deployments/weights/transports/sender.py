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
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Self, TypeVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

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
