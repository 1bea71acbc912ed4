"""The publisher in a trainer rank: a weight source for vLLM's trainer engines, and rounds of the fleet."""

import contextlib
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerWeightTransferEngine, WeightSource

from deployments.calls.rpc import CallHandle
from deployments.protocol.publishing import RoundOptions, RoundReport
from deployments.trainer.addresses import free_port, own_address
from deployments.trainer.fleet_client import FleetWeightSyncClient
from deployments.trainer.snapshots import Snapshot, Snapshots
from deployments.trainer.spec import PUBLISHER, TrainerSpec
from deployments.vllm_plugin import register
from deployments.weights.transports.rank_agreement import PublishTarget, agree
from deployments.weights.transports.registry import (
    TRANSPORTS,
    SameGpu,
    TrainerFacts,
    backend,
    trainer_init_info,
)
from deployments.weights.transports.weight_sender import WeightSender
from deployments.weights.wire.digest import warm_up
from trainers.sources import ParameterSource


class PublishSource(WeightSource):
    """vLLM's view of a parameter source; copies what is sent if asked to.

    The copy is what the store writes later, while the next step already changes the weights. It is made
    while the tensors are sent, so it costs no second gather.

    Args:
        keep_copy: on the rank that writes the store.
    """

    def __init__(self, source: ParameterSource, *, keep_copy: bool) -> None:
        self._source = source
        self._copies = Snapshots(source) if keep_copy else None
        self._running: Iterator[tuple[str, torch.Tensor]] | None = None

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(spec.name, spec.dtype, spec.shape) for spec in self._source.specs()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._running = self._pass()
        return self._running

    def resident(self) -> list[torch.Tensor] | None:
        """See `ParameterSource.resident`."""
        return self._source.resident()

    def begin(self) -> None:
        """To be called before each round."""
        self._running = None
        if self._copies is not None:
            self._copies.begin()

    def drain(self) -> None:
        """Complete the iteration that failed on this rank: the other ranks wait in the same gathers."""
        for _ in self._running if self._running is not None else iter(self):
            pass

    def take_copy(self) -> Snapshot:
        """What was sent in the round; empty on a rank without a copy. Call it before the next step."""
        if self._copies is None:
            return {}
        if self._running is None:  # the model's own memory was sent, without an iteration
            self.drain()
        return self._copies.finish()

    def _pass(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._source:
            if self._copies is not None:
                self._copies.add(name, tensor)
            yield name, tensor


class Publisher:
    """The publisher of this rank's part of the policy. Every rank must call `publish`.

    all ranks   agree on the replicas (`transports.agreement`), and connect again if any rank must
    all ranks   gather layer by layer, and send
    a rank that fails still joins the remaining gathers, because the others wait there
    """

    def __init__(self, spec: TrainerSpec, rank: int, source: ParameterSource, controller: CallHandle) -> None:
        self._spec = spec
        self._rank = rank
        self.source = PublishSource(source, keep_copy=rank == 0)
        self._client = FleetWeightSyncClient(controller, PUBLISHER, RoundOptions())
        self._engine: TrainerWeightTransferEngine[Any] | None = None
        self._epoch: int | None = None
        self.fleet_id: str | None = None  # as rank 0 learned it
        if not spec.native:
            warm_up(source.device)

    def publish(self, label: str | None) -> RoundReport | None:
        """Run one round. Returns its report on rank 0, None elsewhere.

        Raises:
            SlipstreamError: the round was aborted, or no replica can take part; the fleet is as it was.
            TimeoutError: the controller does not answer.
        """
        self.source.begin()
        self._client.label = label
        find = self._current_membership if self._rank == 0 else None
        membership = agree(find, connected=self._is_connected())
        try:
            if membership is not None:
                self._disconnect()
                self._engine, self._epoch = self._connect(membership.workers), membership.epoch
            assert self._engine is not None
            self._engine.send_weights()
        except BaseException as error:
            self._clean_up(error)
            raise
        return self._client.report

    def close(self) -> None:
        """Close the connection."""
        self._disconnect()

    def _clean_up(self, error: BaseException) -> None:
        """After a failed round. Further errors are suppressed: they add nothing to the first one."""
        self._disconnect()
        if self._rank == 0:
            with contextlib.suppress(Exception):
                self._client.abort(str(error))
        if self._spec.config.world_size > 1 and not self._ranks_call_each_other():
            with contextlib.suppress(Exception):
                self.source.drain()

    def _ranks_call_each_other(self) -> bool:
        """Whether ranks wait for each other in collectives of vLLM's engine, beside the source's gathers.

        Its `ipc` engine, where every rank sends to the workers on its own GPU, does so. Draining the source
        would not release those ranks: only the end of the worker group does.
        """
        return self._spec.native and TRANSPORTS[self._spec.transport].same_gpu is SameGpu.POSSIBLE

    def _is_connected(self) -> bool:
        # vLLM's own engines read the source anew in each round: where its tensors are does not matter.
        if isinstance(self._engine, WeightSender):
            return self._engine.is_current()
        return self._engine is not None

    def _current_membership(self) -> PublishTarget:
        fleet = self._client.fleet()
        self.fleet_id = fleet.fleet_id
        connected = fleet.connection is not None and fleet.connection.publisher == PUBLISHER
        return PublishTarget(
            epoch=fleet.epoch,
            workers=fleet.workers,
            changed=not connected or fleet.epoch != self._epoch,
        )

    def _connect(self, workers: int) -> TrainerWeightTransferEngine[Any]:
        register()
        facts = TrainerFacts(
            rank=self._rank,
            workers=workers,
            master_address=own_address(),
            master_port=free_port(),
            chunk_bytes=self._spec.chunk_bytes,
            largest_tensor_bytes=max(
                meta.dtype.itemsize * prod(meta.shape) for meta in self.source.metadata()
            ),
        )
        chosen = backend(self._spec.transport, staging="none" if self._spec.native else "host")
        return WeightTransferTrainerFactory.trainer_init(
            init_info=trainer_init_info(chosen, facts), client=self._client, source=self.source
        )

    def _disconnect(self) -> None:
        engine, self._engine = self._engine, None
        self._epoch = None
        if engine is not None:
            engine.shutdown()
