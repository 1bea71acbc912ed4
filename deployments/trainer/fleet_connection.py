"""A trainer rank's way to the replicas: vLLM's weight-sync client over a publish session, and the transfer
engine."""

import asyncio
import socket
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import ray
from vllm.distributed.weight_transfer import TrainerWeightTransferEngine, WeightTransferTrainerFactory

from deployments.calls.publish_session import PublishSession
from deployments.calls.rpc import RESTART_WAIT_S, RETRY_S, CallHandle, retried, run_sync
from deployments.host.logs import serve_logger
from deployments.host.network import host_port
from deployments.protocol.errors import FleetUnavailable
from deployments.protocol.publishing import RoundOptions, RoundReport
from deployments.protocol.responses import FleetStatus
from deployments.trainer.spec import PUBLISHER, TrainerSpec
from deployments.vllm_plugin import register
from deployments.vllm_versions import Source
from deployments.weights.transports.registry import TRANSPORTS, TrainerFacts, backend, trainer_init_info
from deployments.weights.transports.weight_sender import WeightSender, gather_from_ranks
from deployments.weights.wire.cuda_ipc_handles import encode_payload

logger = serve_logger()
_RETURNING = "returning"  # a member that has not polled since the controller restarted


class FleetWeightSyncClient:
    """vLLM's `VLLMWeightSyncClient` for one publisher, outside event loops. `label` and `options` are of the
    next round, `report` of the last one. Raises as `PublishSession`."""

    def __init__(self, controller: CallHandle, publisher: str, options: RoundOptions) -> None:
        self._controller = controller
        self._session = PublishSession(controller, publisher)
        self.options = options
        self.label: str | None = None
        self.report: RoundReport | None = None

    def fleet(self) -> FleetStatus:
        """After a restart of the controller it waits for members to return."""
        return run_sync(self._fleet())

    async def _fleet(self) -> FleetStatus:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RESTART_WAIT_S
        while True:
            status: FleetStatus = await retried(self._controller, "fleet")
            returning = [each for each in status.members if each.state == _RETURNING]
            if not returning or loop.time() >= deadline:
                return status
            await asyncio.sleep(RETRY_S)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        run_sync(self._session.connect(init_info))

    def start_weight_update(self) -> None:
        self.report = None
        run_sync(self._session.open(self.options))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        run_sync(self._session.send(encode_payload(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """`weight_version` takes precedence over `label`."""
        label = weight_version if weight_version is not None else self.label
        self.report = run_sync(self._session.close(label))
        self.release()

    def abort(self, reason: str) -> None:
        run_sync(self._session.abort(reason))

    def release(self) -> None:
        run_sync(self._session.release())


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishTarget:
    epoch: int
    workers: int  # the sum over all replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankState:
    connected: bool
    target: PublishTarget | None = None  # set on rank 0
    problem: str | None = None  # why rank 0 has no target


class FleetConnection:
    """One rank's transfer engine. All ranks agree first: one that connected alone would wait forever."""

    def __init__(
        self,
        spec: TrainerSpec,
        rank: int,
        client: FleetWeightSyncClient,
        source: Source,
    ) -> None:
        self._spec = spec
        self._rank = rank
        self._client = client
        self._source = source
        self._epoch: int | None = None
        self._engine: TrainerWeightTransferEngine[Any] | None = None

    def agree(self) -> PublishTarget | None:
        """What all ranks must connect to; None if all connections are good. Raises FleetUnavailable."""
        state = _RankState(connected=self._is_connected())
        failure: Exception | None = None
        if self._rank == 0:
            try:
                state = self._with_target(state)
            except Exception as error:  # the other ranks must learn of it first
                state, failure = replace(state, problem=str(error)), error
        ranks = gather_from_ranks(state)
        if failure is not None:
            raise failure
        if ranks[0].problem is not None:
            raise FleetUnavailable(f"rank 0 of the trainer cannot publish: {ranks[0].problem}")
        return None if all(rank.connected for rank in ranks) else ranks[0].target

    def connect(self, target: PublishTarget) -> None:
        self.close()
        register()
        facts = TrainerFacts(
            rank=self._rank,
            workers=target.workers,
            master_address=own_address(),
            master_port=free_port(),
            chunk_bytes=self._spec.chunk_bytes,
            keep_published=self._spec.keep_published,
            largest_tensor_bytes=max(spec.dtype.itemsize * prod(spec.shape) for spec in self._source.specs()),
        )
        if TRANSPORTS[self._spec.transport].rendezvous:
            at = host_port(facts.master_address, facts.master_port)
            logger.info("%d workers meet at %s for %s", facts.workers, at, self._spec.transport)
        chosen = backend(self._spec.transport, staging="none" if self._spec.native else "host")
        self._engine = WeightTransferTrainerFactory.trainer_init(
            init_info=trainer_init_info(chosen, facts), client=self._client, source=self._source
        )
        self._epoch = target.epoch

    def send_weights(self) -> None:
        assert self._engine is not None, "connected before"
        self._engine.send_weights()

    def close(self) -> None:
        engine, self._engine, self._epoch = self._engine, None, None
        if engine is not None:
            engine.shutdown()

    def _is_connected(self) -> bool:
        # vLLM's own engines read the source in each round: its tensors may move.
        if isinstance(self._engine, WeightSender):
            return self._engine.is_current()
        return self._engine is not None

    def _with_target(self, state: _RankState) -> _RankState:
        fleet = self._client.fleet()
        if fleet.workers == 0:  # vLLM disables a communicator of one
            raise FleetUnavailable("no replica is registered to connect to", {"expected": 1, "actual": 0})
        return _RankState(
            connected=state.connected and fleet.connected == PUBLISHER and fleet.epoch == self._epoch,
            target=PublishTarget(epoch=fleet.epoch, workers=fleet.workers),
        )


def own_address() -> str:
    return str(ray.util.get_node_ip_address())


def free_port() -> int:
    """Another process may take it."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
