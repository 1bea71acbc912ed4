"""The sending side of a round in a trainer rank: a source for vLLM's trainer engines, and the handshake."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from ray.serve.handle import DeploymentHandle
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
)

from deployments.errors import FleetUnavailable
from deployments.logs import serve_logger
from deployments.protocol import RoundOptions, RoundReport
from deployments.trainer.fleet_client import FleetWeightSyncClient
from deployments.trainer.snapshots import Snapshot, Snapshots
from deployments.trainer.spec import PUBLISHER, TrainerSpec
from deployments.vllm_plugin import register
from trainers.sources import ParameterSource

FLEET_TIMEOUT_S = 30.0
logger = serve_logger()


class PublishSource(WeightSource):
    """vLLM's view of a parameter source, which keeps a copy of what went out.

    The copy is what the store writes later, while the next step already changes the weights: made while
    they go out, it costs no second gather.

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
        return self._source.resident()

    def begin(self) -> None:
        """Before each round."""
        self._running = None
        if self._copies is not None:
            self._copies.begin()

    def drain(self) -> None:
        """Run a pass that failed on this rank to its end: the others are in the same gathers, waiting."""
        for _ in self._running if self._running is not None else iter(self):
            pass

    def take_copy(self) -> Snapshot:
        """What went out in the round, on the rank that keeps it; before the next step changes it."""
        if self._copies is None:
            return {}
        if self._running is None:  # there was no pass: the model's own memory was sent
            self.drain()
        return self._copies.finish()

    def _pass(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._source:
            if self._copies is not None:
                self._copies.add(name, tensor)
            yield name, tensor


class Publisher:
    """Publishes this rank's part of the policy; every rank must call `publish`.

        rank 0      asks the controller for the fleet ─┐
        all ranks   ◄── all_gather: who is connected, and to which fleet
        all ranks   connect anew if anybody must; then gather layer by layer, and send
        a rank that fails still joins the gathers that are left, for the others wait there

    The connection to the fleet is made anew for each membership: a group of processes that has lost
    or won one cannot be used again, and a restarted controller knows no connection.
    """

    def __init__(
        self, spec: TrainerSpec, rank: int, source: ParameterSource, controller: DeploymentHandle
    ) -> None:
        self._spec = spec
        self._rank = rank
        self._controller = controller
        self.source = PublishSource(source, keep_copy=rank == 0)
        self._client = FleetWeightSyncClient(controller, PUBLISHER, RoundOptions())
        self._engine: TrainerWeightTransferEngine[Any] | None = None
        self._epoch: int | None = None

    def publish(self, label: str | None) -> RoundReport | None:
        """One round. The report, on rank 0; None elsewhere.

        Raises:
            SlipstreamError: the round was aborted, or nobody can take it; the fleet is as it was.
        """
        self.source.begin()
        self._client.options = replace(self._client.options, label=label)
        fleet = self._agree()
        try:
            if fleet is not None:
                self._forget()
                self._engine, self._epoch = self._connect(fleet.workers), fleet.epoch
            assert self._engine is not None
            self._engine.send_weights()
        except BaseException as error:
            self._forget()
            # What went wrong is already known; that the controller cannot be told either, or that a
            # gather breaks off as well, adds nothing.
            if self._rank == 0:
                with contextlib.suppress(Exception):
                    self._client.abort(str(error))
            # The ranks of vLLM's ipc engine wait for each other in calls of its own, not in the gathers
            # alone: nothing but the end of the group brings them out.
            if self._spec.world_size > 1 and not (self._spec.native and self._spec.transport == "ipc"):
                with contextlib.suppress(Exception):
                    self.source.drain()
            raise
        return self._client.report

    def close(self) -> None:
        self._forget()

    def _agree(self) -> "_Fleet | None":
        """Whom to connect to; None if all ranks have a connection that is still good.

        Rank 0 knows the fleet and every rank what it has itself: one that made a connection of its own
        accord would wait for the others, who do not come.
        """
        fleet, failure = None, None
        if self._rank == 0:
            try:
                fleet = self._changed_fleet()
            except Exception as error:  # the other ranks must hear it before it is raised
                failure = error
        # vLLM's own engines do not know: whatever a source yields is right for them.
        fits = self._engine is not None and getattr(self._engine, "fits", lambda: True)()
        mine = (fits, fleet, None if failure is None else str(failure))
        ranks = [mine]
        if self._spec.world_size > 1:
            ranks = [mine] * self._spec.world_size
            torch.distributed.all_gather_object(ranks, mine)
        if failure is not None:
            raise failure
        _, fleet, told = ranks[0]
        if told is not None:
            raise FleetUnavailable(f"rank 0 of the trainer cannot publish: {told}")
        assert fleet is not None
        return fleet if fleet.changed or not all(connected for connected, _, _ in ranks) else None

    def _changed_fleet(self) -> "_Fleet":
        fleet = self._controller.fleet.remote().result(timeout_s=FLEET_TIMEOUT_S)
        connection = fleet["connection"]
        ours = connection is not None and connection["publisher"] == PUBLISHER
        return _Fleet(
            epoch=fleet["epoch"],
            workers=fleet["workers"],
            changed=not ours or fleet["epoch"] != self._epoch,
        )

    def _connect(self, workers: int) -> TrainerWeightTransferEngine[Any]:
        register()
        return WeightTransferTrainerFactory.trainer_init(
            init_info=trainer_init_info(self._spec, self._rank, workers, self.source.metadata()),
            client=self._client,
            source=self.source,
        )

    def _forget(self) -> None:
        engine, self._engine = self._engine, None
        self._epoch = None
        if engine is not None:
            engine.shutdown()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fleet:
    """Attributes:
    workers: of all replicas together, those that receive.
    changed: since the connection was made.
    """

    epoch: int
    workers: int
    changed: bool


def trainer_init_info(
    spec: TrainerSpec, rank: int, workers: int, tensors: Sequence[ParamMeta]
) -> TrainerInitInfo:
    """What the transport's sending half needs.

    Args:
        workers: of all replicas together, those that receive.
        tensors: what will be sent.

    Raises:
        ValueError: a transport that is not known.
    """
    match spec.transport:
        case "shm":
            from deployments.weights.transports.shm import ShmTrainerInitInfo

            return ShmTrainerInitInfo(rank=rank, chunk_bytes=spec.chunk_bytes)
        case "gloo":
            from deployments.weights.transports.gloo import GlooTrainerInitInfo

            return GlooTrainerInitInfo(rank=rank, chunk_bytes=spec.chunk_bytes, **_meeting(workers))
        case "ipc" if spec.native:
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            largest = max(meta.dtype.itemsize * prod(meta.shape) for meta in tensors)
            buffer_bytes = max(spec.chunk_bytes, largest)  # it refuses a tensor that is larger
            return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=buffer_bytes)
        case "ipc":
            from deployments.weights.transports.ipc import IpcTrainerInitInfo

            return IpcTrainerInitInfo(rank=rank, world_size=1 + workers, chunk_bytes=spec.chunk_bytes)
        case "nccl" if spec.native:
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            # One buffer: the receiver of vLLM 0.32 does not order its streams when there are more.
            sizes = {"packed_buffer_size_bytes": spec.chunk_bytes, "packed_num_buffers": 1}
            return NCCLTrainerInitInfo(rank=rank, **_meeting(workers), **sizes)
        case "nccl":
            from deployments.weights.transports.nccl import NcclTrainerInitInfo

            return NcclTrainerInitInfo(rank=rank, chunk_bytes=spec.chunk_bytes, **_meeting(workers))
    raise ValueError(f"transport must be one of 'shm', 'gloo', 'ipc', 'nccl', got {spec.transport!r}")


def _meeting(workers: int) -> dict[str, Any]:
    return {"master_address": own_address(), "master_port": free_port(), "world_size": 1 + workers}


def own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
