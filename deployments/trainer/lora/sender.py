"""An adapter's two files on their way to the replicas' memory, over the transport that weights take.

The files are the tensors: their bytes, under their names, so what a replica loads has the digest of the
fleet's copy. A transfer that fails costs time and nothing else: the replicas load the fleet's copy.

Over a transport whose ranks reach only the replicas on their own GPU, every rank sends: each has the whole
adapter. They agree first, as for a round, because a rank that connected on its own would wait for the others.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerWeightTransferEngine, WeightSource

from deployments.calls.rpc import CallHandle, run_sync
from deployments.host.logs import serve_logger
from deployments.protocol.errors import Conflict, SlipstreamError, TransferFailed
from deployments.protocol.publishing import RoundOptions
from deployments.trainer.addresses import free_port, own_address
from deployments.trainer.fleet_client import FleetWeightSyncClient
from deployments.trainer.spec import PUBLISHER, TrainerSpec
from deployments.vllm_plugin import register
from deployments.weights.transports.rank_agreement import PublishTarget, agree, call_off
from deployments.weights.transports.registry import (
    TRANSPORTS,
    SameGpu,
    TrainerFacts,
    backend,
    trainer_init_info,
)

ONE_CHUNK = 1 << 62  # so a transfer is one payload on every transport
logger = serve_logger()


class FileSource(WeightSource):
    """The bytes of files (uint8 [size]) under their names."""

    def __init__(self) -> None:
        self._files: dict[str, torch.Tensor] = {}

    def take(self, files: Mapping[str, torch.Tensor]) -> bool:
        """Take the contents of files; whether their sizes are others than before."""
        before = self.metadata()
        self._files = dict(files)
        return self.metadata() != before

    def forget(self) -> None:
        """Free the bytes; the sizes stay known."""
        self._files = {name: torch.empty_like(each, device="meta") for name, each in self._files.items()}

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in self._files.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._files.items())


class AdapterSyncClient(FleetWeightSyncClient):
    """vLLM's weight-sync client, for a transfer that is no round.

    Attributes:
        load_id: of the load that the files are for.
        on_sending: called when the replicas are about to receive.
    """

    load_id = ""
    on_sending: Callable[[], None] = staticmethod(lambda: None)

    def start_weight_update(self) -> None:
        run_sync(self._session.acquire())

    def update_weights(self, update_info: Any) -> None:
        self.on_sending()
        run_sync(self._session.send_adapter(self.load_id, update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.release()


class AdapterSender:
    """Sends adapters to the replicas that serve. The connection lasts as long as membership and sizes do.

    Args:
        every_rank: every rank has a sender, and all of them send; else rank 0 alone.
    """

    def __init__(self, spec: TrainerSpec, rank: int, controller: CallHandle, *, every_rank: bool) -> None:
        self._spec = spec
        self._rank = rank
        self._every_rank = every_rank
        self._client = AdapterSyncClient(controller, PUBLISHER, RoundOptions())
        self._source = FileSource()
        self._engine: TrainerWeightTransferEngine[Any] | None = None
        self._epoch: int | None = None
        self._agreed = False  # in this publish

    def send(
        self,
        files: Mapping[str, torch.Tensor],
        load_id: str = "",
        on_sending: Callable[[], None] = lambda: None,
    ) -> float | None:
        """Send an adapter's files; the seconds that took. None: it failed, and the log says why.

        Where every rank sends, every rank calls this with the same files, or rank 0 calls `end`.

        Args:
            files: their bytes (uint8 [size], on any device) by name, in one order always.
            load_id: of the load that they are for; rank 0's counts.
            on_sending: on rank 0, called once the replicas are about to receive; not if they never are.

        Raises:
            Exception: where every rank sends, a fault of this process that the others do not know of.
        """
        began = time.perf_counter()
        self._client.load_id, self._client.on_sending = load_id, on_sending
        try:
            self._connect_if_needed(resized=self._source.take(files))
            assert self._engine is not None
            self._engine.send_weights()
        except Exception as error:  # whatever it is, there is the store
            self.close()
            self._client.release()
            if self._every_rank and not isinstance(error, SlipstreamError | TransferFailed | ValueError):
                raise  # other ranks may wait for this one, and have not been told
            if self._rank == 0:
                logger.warning(
                    "replicas read the adapter from the store: its transfer over %r failed: %s",
                    self._spec.transport,
                    _last_line(error),
                )
            return None
        finally:
            self._source.forget()
        return time.perf_counter() - began

    def end(self) -> None:
        """On rank 0, after each publish: free the other ranks if it never came to a transfer."""
        if self._every_rank and not self._agreed:
            call_off("it sends nothing")
        self._agreed = False

    def close(self) -> None:
        """Close the connection."""
        engine, self._engine, self._epoch = self._engine, None, None
        if engine is not None:
            engine.shutdown()

    def _connect_if_needed(self, *, resized: bool) -> None:
        self._agreed = True
        find = self._current_membership if self._rank == 0 else None
        connected = self._engine is not None and not resized
        membership = agree(find, connected=connected, together=self._every_rank)
        if membership is None:
            return
        self.close()
        register()
        facts = TrainerFacts(
            rank=self._rank,
            workers=membership.workers,
            master_address=own_address(),
            master_port=free_port(),
            chunk_bytes=ONE_CHUNK,
        )
        info = trainer_init_info(backend(self._spec.transport, staging="host"), facts)
        self._engine = WeightTransferTrainerFactory.trainer_init(
            init_info=info, client=self._client, source=self._source
        )
        self._epoch = membership.epoch

    def _current_membership(self) -> PublishTarget:
        fleet = self._client.fleet()
        if fleet.connection is not None and fleet.connection.publisher != PUBLISHER:
            raise Conflict(f"{fleet.connection.publisher!r} is connected, and its connection is left to it")
        return PublishTarget(
            epoch=fleet.epoch,
            workers=fleet.workers,
            changed=fleet.connection is None or fleet.epoch != self._epoch,
        )


def adapter_sender(spec: TrainerSpec, rank: int, controller: CallHandle) -> AdapterSender | None:
    """None: this rank does not send, or the replicas read every adapter from the store.

    vLLM's own engines send weights alone.
    """
    every_rank = TRANSPORTS[spec.transport].same_gpu is SameGpu.POSSIBLE and spec.config.world_size > 1
    if spec.native or (rank != 0 and not every_rank):
        return None
    return AdapterSender(spec, rank, controller, every_rank=every_rank)


def _last_line(error: Exception) -> str:
    """Of its message: Ray's begin with a trace."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
