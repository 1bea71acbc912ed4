"""The publisher's half of every transport.

    start_weight_update     every replica begins a session
    update_weights          the call inside which the replicas receive; it runs beside the sending
    transfer                packs the source's tensors and moves the bytes (the transport's own part)
    finish_weight_update    the fleet verifies and commits

Whatever goes wrong, no receiver is left waiting: `give_up` ends their waits, and the call is never joined
then, because it ends when the fleet has given the round up.
"""

from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Self, TypeVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from deployments.weights.packing import describe, plan_chunks

Init = TypeVar("Init", bound=TrainerInitInfo)
Tensors = Iterator[tuple[str, torch.Tensor]]


class SendingEngine(TrainerWeightTransferEngine[Init], Generic[Init]):
    """On every trainer rank; only rank 0, the sender, calls the fleet.

    Args:
        chunk_bytes: the size of the pieces in which tensors are sent; see `plan_chunks`.
    """

    def __init__(
        self, *, client: VLLMWeightSyncClient, source: WeightSource, is_sender: bool, chunk_bytes: int
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._metadata = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
        self.chunks = plan_chunks(self._metadata, chunk_bytes)

    @classmethod
    def trainer_init(
        cls, init_info: Init, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        if source is None:
            raise ValueError(f"transport {init_info.backend!r} needs a WeightSource, got None")
        engine = cls(
            client=client, source=source, is_sender=init_info.is_sender, chunk_bytes=init_info.chunk_bytes
        )
        try:
            engine.meet(init_info)
        except BaseException:  # whatever it was: who came to the meeting must not wait for the rest
            engine.shutdown()
            raise
        return engine

    def send_weights(self) -> None:
        assert self.source is not None
        tensors = iter(self.source)
        if self.is_sender:
            self.client.start_weight_update()
        calls = ThreadPoolExecutor(max_workers=1)
        try:
            self.transfer(tensors, calls)
        except BaseException:  # whatever it was, the receivers must not wait for the rest
            self.give_up()
            raise
        finally:
            calls.shutdown(wait=False)
        if self.is_sender:
            self.client.finish_weight_update()

    @abstractmethod
    def meet(self, init_info: Init) -> None:
        """Agree with the replicas on how the bytes move. Called once, on every trainer rank."""

    @abstractmethod
    def transfer(self, tensors: Tensors, calls: ThreadPoolExecutor) -> None:
        """Send all chunks, and make the calls inside which they are received on `calls`."""

    def follow(self, tensors: Tensors) -> None:
        """A trainer rank that sends nothing: materializing is a collective, so it takes part."""
        for _ in tensors:
            pass

    def give_up(self) -> None:
        """End the receivers' waits for a round that will not be finished."""


class OnePayloadEngine(SendingEngine[Init], Generic[Init]):
    """A round is one payload, received inside one call."""

    def transfer(self, tensors: Tensors, calls: ThreadPoolExecutor) -> None:
        if not self.is_sender:
            self.follow(tensors)
            return
        receiving = calls.submit(self.client.update_weights, self.payload())
        self.send(tensors, receiving)
        receiving.result()

    def payload(self) -> dict[str, Any]:
        """What the receivers are told: what comes, and in which order."""
        return describe(self._metadata)

    @abstractmethod
    def send(self, tensors: Tensors, receiving: Future[None] | None) -> None:
        """Send all chunks. `receiving` is the sender's call: if it has failed, nobody receives."""
