"""The publisher's half of every transport.

    prepare                 what can be done before the replicas know of the round
    start_weight_update     every replica begins a session
    update_weights          the call inside which the replicas receive; it runs beside the sending
    transfer                packs the source's tensors and moves the bytes (the transport's own part)
    finish_weight_update    the fleet verifies and commits

Whatever goes wrong, no receiver is left waiting: `give_up` ends their waits, and the call is never joined
then, because it ends when the fleet has given the round up.
"""

from abc import abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Self, TypeVar

from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from deployments.weights.transports.chunk_packer import Packer

Init = TypeVar("Init", bound=TrainerInitInfo)


class SendingEngine(TrainerWeightTransferEngine[Init], Generic[Init]):
    """On every trainer rank; only rank 0, the sender, calls the fleet.

    Args:
        chunk_bytes: the size of the pieces in which tensors are sent; see `plan_chunks`.
    """

    def __init__(
        self, *, client: VLLMWeightSyncClient, source: WeightSource, is_sender: bool, chunk_bytes: int
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.packer = Packer(source, chunk_bytes)

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
        self.packer.begin()
        self.prepare()
        if self.is_sender:
            self.client.start_weight_update()
        calls = ThreadPoolExecutor(max_workers=1)
        try:
            self.transfer(calls)
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

    def fits(self) -> bool:
        """Whether the connection is still good for where the source's tensors are now."""
        return True

    def prepare(self) -> None:
        """What can be done before the replicas know of the round."""

    @abstractmethod
    def transfer(self, calls: ThreadPoolExecutor) -> None:
        """Send all chunks, and make the calls inside which they are received on `calls`."""

    def follow(self) -> None:
        """A trainer rank that is not the sender."""
        self.packer.skip()

    def give_up(self) -> None:
        """End the receivers' waits for a round that will not be finished."""


class OnePayloadEngine(SendingEngine[Init], Generic[Init]):
    """A round is one payload, received inside one call."""

    def transfer(self, calls: ThreadPoolExecutor) -> None:
        if not self.is_sender:
            self.follow()
            return
        receiving = calls.submit(self.client.update_weights, self.payload())
        self.send(receiving)
        receiving.result()

    def payload(self) -> dict[str, Any]:
        """What the receivers are told of this round; they know since the connection which tensors come."""
        return {}

    @abstractmethod
    def send(self, receiving: Future[None] | None) -> None:
        """Send all chunks. `receiving` is the sender's call: if it has failed, nobody receives."""
