"""Publishes the weights of a trainer of your own to a running fleet.

Bytes travel over one of Slipstream's transports, everything else over vLLM's RL routes with vLLM's client.
"""

import socket
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import requests
from transformers import PreTrainedModel
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, WeightTransferTrainerFactory

from app.client import calls
from app.client.connection import FleetClient, bearer, without_credentials
from deployments.protocol.publishing import RoundReport
from deployments.trainer.base_checkpoint import BaseCheckpoint
from deployments.trainer.weight_publisher import PublishSource
from deployments.vllm_plugin import register
from deployments.weights.transports.registry import TrainerFacts, trainer_init_info
from trainers.sources import ParameterSource


class Publisher:
    """Connects to every replica of a fleet, and publishes a model's parameters as its next version.

        with Publisher("http://127.0.0.1:8000", model, checkpoint="Qwen3-8B", transport="shm") as publisher:
            for batch in batches:
                train(model, batch)
                print(publisher.publish().version)

    The fleet runs without a trainer deployment.

    Args:
        url: the fleet's.
        model: a transformers model; each `publish` reads its current parameters.
        checkpoint: the directory that the fleet serves. Tensors in it that `model` lacks, such as a vision
            tower, are sent as they are there. None: `model` has every tensor of the checkpoint.
        transport: `shm` or `gloo` for a fleet on CPUs; `slipstream_ipc` or `slipstream_nccl` on GPUs;
            vLLM's own `ipc` and `nccl`. As the fleet's `weights.transport`.
        token: the fleet's; None: it has none.
        address: this host's, as replicas reach it.
        timeout_s: for each call to the fleet.

    Raises:
        FleetError: the fleet refuses, or does not respond.
        RuntimeError: the fleet refuses a call of vLLM's client; the text has the status and the reason.
        ValueError: no such transport, or a module is trained in part.
    """

    def __init__(
        self,
        url: str,
        model: PreTrainedModel,
        *,
        checkpoint: str | Path | None = None,
        transport: str = "shm",
        token: str | None = None,
        address: str = "127.0.0.1",
        timeout_s: float = 300.0,
    ) -> None:
        register()
        self._fleet = FleetClient.connect(url, token, timeout_s)
        facts = TrainerFacts(
            rank=0,
            workers=self._fleet.send(calls.world_size()),
            master_address=address,
            master_port=_free_port(),
        )
        source = whole_source(model, None if checkpoint is None else Path(checkpoint))
        self._source = PublishSource(source, keep_copy=False)
        self._engine = WeightTransferTrainerFactory.trainer_init(
            trainer_init_info(transport, facts),
            client=_TokenClient(url, token, timeout_s),
            source=self._source,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def publish(self) -> RoundReport:
        """Make the model's parameters the fleet's next version; returns the round's report. Raises FleetError
        or RuntimeError: the fleet does not respond, or refused and keeps its version."""
        self._source.begin()
        self._engine.send_weights()
        return self._fleet.send(calls.rounds())[-1]

    def close(self) -> None:
        """Disconnect the replicas and free this end's resources."""
        try:
            self._fleet.send(calls.disconnect())
        finally:
            self._engine.shutdown()
            self._fleet.http.close()


def whole_source(model: PreTrainedModel, checkpoint: Path | None) -> ParameterSource:
    """Every tensor of a checkpoint: the model's own, and the others from the directory."""
    if checkpoint is None:
        return ParameterSource(model)
    base = BaseCheckpoint(checkpoint)
    trained = [spec.name for spec in ParameterSource(model, stored=base.names).specs()]
    frozen = base.read(base.frozen(trained), checkpoint)
    return ParameterSource(model, stored=base.names, frozen=frozen)


class _TokenClient(HTTPVLLMWeightSyncClient):
    """vLLM's client, which cannot send a token, with the fleet's token."""

    def __init__(self, url: str, token: str | None, timeout_s: float) -> None:
        address, password = without_credentials(url)
        super().__init__(address, timeout=timeout_s)
        self._headers = bearer(token if password is None else password)

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        answer = requests.post(
            f"{self.base_url}/{path}", json=json, timeout=self.timeout, headers=self._headers
        )
        if not answer.ok:
            raise RuntimeError(f"/{path}: {answer.status_code}: {answer.text}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
