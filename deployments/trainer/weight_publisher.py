import contextlib
from collections.abc import Iterator, Mapping

import torch
from vllm.distributed.weight_transfer import ParamMeta

from deployments.calls.rpc import CallHandle
from deployments.protocol.errors import AnswerLost
from deployments.protocol.publishing import RoundOptions, RoundReport
from deployments.trainer.fleet_connection import FleetConnection, FleetWeightSyncClient
from deployments.trainer.host_copies import GpuCopier
from deployments.trainer.spec import PUBLISHER, TrainerSpec
from deployments.vllm_versions import Source
from deployments.weights.transports.registry import TRANSPORTS, SameGpu
from deployments.weights.wire.digest import warm_up
from trainers.sources import ParameterSource


class PublishSource(Source):
    """vLLM's view of a parameter source. `keep_copy`: copy what is sent, for the store."""

    def __init__(self, source: ParameterSource, *, keep_copy: bool) -> None:
        self._source = source
        self._keep_copy = keep_copy
        self._copier = GpuCopier(source) if keep_copy and source.device.type == "cuda" else None
        self._copy: dict[str, torch.Tensor] = {}
        self._running: Iterator[tuple[str, torch.Tensor]] | None = None

    def specs(self) -> list[ParamMeta]:
        return [ParamMeta(spec.name, spec.dtype, spec.shape) for spec in self._source.specs()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._running = self._pass()
        return self._running

    def resident(self) -> list[torch.Tensor] | None:
        return self._source.resident()

    def begin(self) -> None:
        self._running, self._copy = None, {}
        if self._copier is not None:
            self._copier.begin()

    def drain(self) -> None:
        """Complete an iteration that failed on this rank: the others wait in the same gathers."""
        for _ in self._running if self._running is not None else iter(self):
            pass

    def take_copy(self) -> dict[str, torch.Tensor]:
        """What was sent; empty on a rank without a copy. Call it before the next step."""
        if not self._keep_copy:
            return {}
        if self._running is None:  # the model's own memory was sent, without an iteration
            self.drain()
        if self._copier is not None:
            self._copier.wait()
        copy, self._copy = self._copy, {}
        return copy

    def _pass(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._source:
            if self._copier is not None:
                self._copy[name] = self._copier.add(name, tensor)
            elif self._keep_copy:
                self._copy[name] = tensor.to("cpu", copy=True)
            yield name, tensor


class WeightPublisher:
    """Every rank calls `publish`, and joins all gathers even if it fails: the others wait there."""

    def __init__(self, spec: TrainerSpec, rank: int, source: ParameterSource, controller: CallHandle) -> None:
        self._spec = spec
        self._rank = rank
        self.source = PublishSource(source, keep_copy=rank == 0)
        self._client = FleetWeightSyncClient(controller, PUBLISHER, RoundOptions())
        self._connection = FleetConnection(spec, rank, self._client, self.source)
        self.unanswered: Mapping[str, torch.Tensor] = {}  # sent in a round that may be committed
        if not spec.native:
            warm_up(source.device)

    def publish(self, label: str | None, after: int | None = None) -> RoundReport | None:
        """Returns the report on rank 0. Raises AnswerLost (it may be committed, with the tensors in
        `unanswered`) or another SlipstreamError (the fleet is as it was)."""
        self.source.begin()
        self.unanswered = {}
        self._client.label, self._client.options = label, RoundOptions(after=after)
        membership = self._connection.agree()
        try:
            if membership is not None:
                self._connection.connect(membership)
            self._connection.send_weights()
        except BaseException as error:
            if isinstance(error, AnswerLost):
                self.unanswered = self.source.take_copy()
            self._clean_up(error)
            raise
        return self._client.report

    def close(self) -> None:
        self._connection.close()

    def _clean_up(self, error: BaseException) -> None:
        """Further errors are suppressed: the first one is raised."""
        self._connection.close()
        if self._rank == 0:
            with contextlib.suppress(Exception):
                self._client.abort(str(error))
        # vLLM's `ipc` engine has collectives beside the source's gathers: only the end of the worker group
        # releases ranks that wait there.
        has_collectives = self._spec.native and TRANSPORTS[self._spec.transport].same_gpu is SameGpu.POSSIBLE
        if self._spec.config.world_size > 1 and not has_collectives:
            with contextlib.suppress(Exception):
                self.source.drain()
