"""A trainer of an adapter beside the fleet that serves adapters.

That fleet's own trainer trains all weights. This one is an application of its own, which publishes to the
same controller, so that no second fleet has to be started.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.protocol.responses import AdapterReport
from deployments.trainer.spec import TrainerSpec
from deployments.trainer.trainer import Trainer
from tests.fleet.adapter_fleet import TRANSPORT, Adapted
from tests.fleet.talk import PROMPT, sampled
from trainers.settings import LoraConfig, OptimizerConfig, TrainerConfig

APPLICATION = "adapting"
CALL_S = 120.0
LORA = LoraConfig(name="trained", rank=4, alpha=16.0)
LEARNING_RATE = 0.05  # a step changes the answers, or at least their log-probabilities


class AdapterTrainer:
    """Its calls, as the routes make them."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    def step(self, client: httpx.Client) -> int:
        """One step on the fleet's answers; how many there have been."""
        answers = [
            sampled(client, index).trajectory(PROMPT, 1.0 if index % 2 else -1.0) for index in range(4)
        ]
        return int(self._call("step", [asdict(answer) for answer in answers])["step"])

    def publish(self, label: str | None = None) -> AdapterReport:
        report: AdapterReport = self._call("publish", label)
        return report

    def save(self, path: Path) -> Path:
        return Path(self._call("save", str(path)).path)

    def _call(self, method: str, *args: Any) -> Any:
        return getattr(self._handle, method).remote(*args).result(timeout_s=CALL_S)


@contextmanager
def adapter_trainer(adapted: Adapted) -> Iterator[AdapterTrainer]:
    spec = TrainerSpec(
        config=TrainerConfig(optimizer=OptimizerConfig(learning_rate=LEARNING_RATE), lora=LORA),
        model=str(adapted.fleet.checkpoint),
        device="cpu",
        store_dir=str(adapted.fleet.store),
        transport=TRANSPORT,
        chunk_bytes=1 << 20,
        native=False,
    )
    trainer = serve.deployment(
        Trainer,
        name="trainer",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=100,
        health_check_period_s=1.0,
    ).bind(spec, serve.get_deployment_handle("controller", adapted.fleet.application))
    handle = serve.run(trainer, name=APPLICATION, route_prefix=None)
    try:
        yield AdapterTrainer(handle)
    finally:
        serve.delete(APPLICATION)
