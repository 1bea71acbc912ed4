"""Publishes the weights of a trainer of your own to a running fleet. Bytes travel over one of Slipstream's
transports, everything else over vLLM's RL routes with vLLM's client."""

import logging
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from transformers import PreTrainedModel
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, WeightTransferTrainerFactory

from app.client import calls
from app.client.connection import Call, FleetClient, FleetError
from deployments.calls import publish_session
from deployments.host.network import address_towards
from deployments.protocol.errors import SlipstreamError
from deployments.protocol.publishing import RoundReport
from deployments.protocol.responses import FleetStatus
from deployments.trainer.base_checkpoint import BaseCheckpoint, summary
from deployments.trainer.fleet_connection import free_port
from deployments.trainer.weight_publisher import PublishSource
from deployments.vllm_plugin import register
from deployments.vllm_versions import Source
from deployments.weights.transports.registry import KeepPublished, TrainerFacts, trainer_init_info
from deployments.weights.wire.checkpoint_schema import join_reasons
from trainers.sources import ParameterSource

logger = logging.getLogger(__name__)


class Publisher:
    """Connects to every replica of a fleet, and publishes a model's parameters as its next version.

        with Publisher("http://127.0.0.1:8000", model, checkpoint="/data/Qwen3-8B") as publisher:
            for batch in batches:
                train(model, batch)
                print(publisher.publish().version)

    The fleet runs without a trainer deployment.

    Args:
        url: the fleet's.
        model: a transformers model; each `publish` reads its current parameters. Or a `Source`, which yields
            tensors by their names in the checkpoint.
        checkpoint: the directory that the fleet serves. Tensors in it that `model` lacks, such as a vision
            tower, are sent as they are there. None: `model` has every tensor of the checkpoint.
        transport: `shm` or `gloo` for a fleet on CPUs; `slipstream_ipc` or `slipstream_nccl` on GPUs;
            vLLM's own `ipc` and `nccl`. As the fleet's `weights.transport`.
        token: the fleet's; None: it has none.
        address: this host's, as replicas reach it. None: the one in the network that leads to the fleet.
        keep_published: over `slipstream_nccl`: keep the last version on the `device`, or in the memory of the
            `host`, to send only what has changed. None: send all.
        timeout_s: for each call to the fleet.

    Raises:
        FleetError: the fleet refuses, or does not respond.
        ValueError: no such transport or checkpoint, a module is trained in part, or a checkpoint beside a
            `Source`.
    """

    def __init__(
        self,
        url: str,
        model: PreTrainedModel | Source,
        *,
        checkpoint: str | Path | None = None,
        transport: str = "shm",
        token: str | None = None,
        address: str | None = None,
        keep_published: Literal["device", "host"] | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        source = source_of(model, None if checkpoint is None else Path(checkpoint))
        register()
        self._fleet = FleetClient.connect(url, token, timeout_s)
        facts = TrainerFacts(
            rank=0,
            workers=self._fleet.send(calls.world_size()),
            master_address=address_towards(urlsplit(url).hostname or "") if address is None else address,
            master_port=free_port(),
            keep_published=None if keep_published is None else KeepPublished(keep_published),
        )
        self._timeout_s = timeout_s
        self._client = _Client(self._fleet)
        self._engine = WeightTransferTrainerFactory.trainer_init(
            trainer_init_info(transport, facts), client=self._client, source=source
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def publish(self) -> RoundReport:
        """Make the model's parameters the fleet's next version. Raises FleetError: the fleet refused and
        keeps its version, or did not respond; if the text says that the round may be committed, nothing
        answered for `timeout_s` after its last call was lost."""
        self._client.take_finishing()  # left by a publish that Ctrl-C ended
        lost: FleetError | None = None
        try:
            self._engine.send_weights()
        except FleetError as error:
            lost = error
        except BaseException:  # also Ctrl-C: the round must not keep its lease
            self._client.abort()
            raise
        finishing = self._client.take_finishing()
        if finishing is None:
            self._client.abort()
            raise FleetError("the engine did not finish the round") if lost is None else lost
        return outcome(self._fleet, finishing, self._timeout_s, lost)

    def close(self) -> None:
        try:
            self._fleet.send(calls.disconnect())
        finally:
            self._engine.shutdown()
            self._fleet.http.close()


def source_of(model: PreTrainedModel | Source, checkpoint: Path | None) -> Source:
    if not isinstance(model, Source):
        return PublishSource(whole_source(model, checkpoint), keep_copy=False)
    if checkpoint is not None:
        raise ValueError(f"a Source yields every tensor itself, got checkpoint={str(checkpoint)!r} beside it")
    return model


def whole_source(model: PreTrainedModel, checkpoint: Path | None) -> ParameterSource:
    if checkpoint is None:
        return ParameterSource(model)
    base = BaseCheckpoint(checkpoint)
    if not base.names:
        raise ValueError(
            f"checkpoint: expected a directory with *.safetensors files, got {str(checkpoint)!r}"
        )
    trained = [spec.name for spec in ParameterSource(model, stored=base.names).specs()]
    frozen = base.frozen(trained)
    if frozen:
        logger.warning(
            "the model lacks %d of %d tensors of %s, which are sent as they are there: %s",
            len(frozen),
            len(base.names),
            checkpoint,
            join_reasons(summary(frozen)),
        )
    return ParameterSource(model, stored=base.names, frozen=base.read(frozen, checkpoint))


def outcome(
    fleet: FleetClient, opened: FleetStatus, limit_s: float, lost: FleetError | None = None
) -> RoundReport:
    """The report of a round whose commit was requested. `opened`: the fleet's status while it was open.
    `lost`: what the committing call raised. Raises FleetError: aborted, unknown to the fleet, or unanswered
    within `limit_s`."""
    assert opened.round is not None, "a round was open"
    round_id, until = opened.round.round_id, time.monotonic() + limit_s
    while True:
        problem: object = "it has not ended yet"
        try:
            now, ended = fleet.send(calls.fleet()), fleet.send(calls.rounds())
            report = publish_session.outcome(round_id, opened.fleet_id, now, ended)
        except SlipstreamError as error:  # it was aborted, or nothing is known of it
            raise FleetError(error.message) from lost
        except FleetError as silent:
            report, problem = None, silent
        if report is not None:
            return report
        if time.monotonic() >= until:
            raise FleetError(f"round {round_id} may be committed: {problem}") from lost
        time.sleep(publish_session.ASK_AGAIN_S)


class _Client(HTTPVLLMWeightSyncClient):
    def __init__(self, fleet: FleetClient) -> None:
        super().__init__(str(fleet.http.base_url))
        self._fleet = fleet
        self._opened: FleetStatus | None = None
        self._finishing: FleetStatus | None = None

    def take_finishing(self) -> FleetStatus | None:
        """The fleet's status before the commit; None: there was none."""
        taken, self._finishing = self._finishing, None
        return taken

    def abort(self) -> None:
        """Unless its commit was requested. Else the fleet waits for the lease to end."""
        opened, self._opened = self._opened, None
        if opened is not None and opened.round is not None:
            with suppress(FleetError):  # it has ended, or nothing answers: the lease ends
                self._fleet.send(calls.abort_update(opened.round.round_id))

    def start_weight_update(self) -> None:
        self._opened = None
        super().start_weight_update()
        self._opened = self._fleet.send(calls.fleet())

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        status, self._opened = self._fleet.send(calls.fleet()), None
        self._finishing = None if status.round is None else status  # else the call says why it is not open
        super().finish_weight_update(weight_version)

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        self._fleet.send(Call(method="POST", path=f"/{path}", body=json, read=lambda content, headers: None))
