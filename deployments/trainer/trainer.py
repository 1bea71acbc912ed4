"""The trainer deployment: steps, publishes and saves, one at a time, in its group of workers.

    step, publish, save, rollback ──► one queue, first come first served ──► every rank
    status, check_health          ──► answered at once, also during a step

Steps and publishes change or read the same weights, so they take turns. Callers wait in the queue; no call
is refused because another one runs.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from pydantic import JsonValue
from ray.serve.handle import DeploymentHandle

from deployments.errors import SlipstreamError
from deployments.logs import serve_logger
from deployments.protocol.publishing import RoundReport
from deployments.trainer.lost_version import watch
from deployments.trainer.spec import PUBLISHER, TrainerSpec
from deployments.trainer.worker import TrainerWorker
from deployments.trainer.worker_group import WorkerGroup
from deployments.trainer_reports import SavedCheckpoint, TrainerStatus
from deployments.weights.transports.registry import TRANSPORTS, SameGpu
from trainers.learner import Metrics

FLUSH_TIMEOUT_S = 20.0
# Of the whole shutdown: Serve waits a few seconds for calls, then the last version is written.
STOP_TIMEOUT_S = FLUSH_TIMEOUT_S + 10.0
logger = serve_logger()


class Trainer:
    """Serve's deployment class of the trainer.

    Args:
        spec: what the workers are started with.
        controller: the fleet's controller.
        slots: whose GPUs the ranks share with the replicas; None if they have GPUs of their own.

    Raises:
        FleetUnavailable: a worker died while it loaded the model, or did not load it in time.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, spec: TrainerSpec, controller: DeploymentHandle, slots: DeploymentHandle | None = None
    ) -> None:
        self._spec = spec
        self._step_timeout_s = spec.config.step_timeout_s
        self._controller = controller
        self._queue = asyncio.Lock()  # asyncio's lock is fair: first come, first served
        self._doing: str | None = None
        self._since = time.monotonic()
        self._last_step: Metrics = {}
        self._last_round: RoundReport | None = None
        plan = None if slots is None else await slots.plan.remote()
        if TRANSPORTS[spec.transport].same_gpu is SameGpu.REQUIRED:  # replicas open the trainer's memory
            await self._free_shared_memory()
        self._group, self._loaded = await WorkerGroup.start(spec, controller, plan)
        self._version = self._loaded.version
        self._step = self._loaded.step
        self._watch = asyncio.create_task(
            watch(lambda: controller.fleet.remote(), self.publish, lambda: self._version)
        )

    async def step(self, trajectories: Sequence[JsonValue]) -> Metrics:
        """One optimizer step on trajectories in their JSON form; returns its metrics.

        Raises:
            InvalidRequest: the batch is malformed; nothing has changed.
            FleetUnavailable: a worker was lost; the trainer is being restarted.
        """
        async with self._turn("step"):
            metrics = await self._group.call(TrainerWorker.step, trajectories, timeout_s=self._step_timeout_s)
            self._step, self._last_step = int(metrics["step"]), metrics
            return metrics

    async def publish(self, label: str | None = None) -> RoundReport:
        """Move the fleet to the current weights.

        Raises:
            RoundAborted: the fleet still serves the old version; try again.
            FleetUnavailable: no replica can take part, or a worker was lost.
        """
        async with self._turn("publish"):
            return await self._publish(label)

    async def rollback(self, version: int) -> RoundReport:
        """Load the weights of a stored version, and publish them as an ordinary, newer one.

        Raises:
            InvalidRequest: the version is not in the store.
            RoundAborted: the trainer has the stored weights and the fleet has not; publish again.
            FleetUnavailable: no replica can take part, or a worker was lost.
        """
        async with self._turn("rollback"):
            await self._controller.rollback_source.remote(version)
            await self._group.call(TrainerWorker.load_version, version, timeout_s=self._step_timeout_s)
            return await self._publish(f"rollback to {version}")

    async def save(self, path: str | None = None) -> SavedCheckpoint:
        """Write the weights as an ordinary Hugging Face checkpoint directory on the trainer's host.

        Raises:
            InvalidRequest: the directory cannot be written.
            FleetUnavailable: a worker was lost.
        """
        async with self._turn("save"):
            return await self._group.call(TrainerWorker.save, path, timeout_s=self._step_timeout_s)

    async def status(self) -> TrainerStatus:
        """Answered at once, also during a step.

        Raises:
            FleetUnavailable: rank 0 does not answer.
        """
        store = await self._group.store_status()
        return TrainerStatus(
            step=self._step,
            version=self._version,
            doing=self._doing,
            doing_s=round(time.monotonic() - self._since, 3) if self._doing is not None else 0.0,
            strategy=str(self._spec.config.strategy),
            world_size=self._spec.config.world_size,
            transport=self._spec.transport,
            parameters=self._loaded.parameters,
            last_step=self._last_step,
            last_round=self._last_round,
            stored_version=store.stored_version,
            store_problem=store.store_problem,
        )

    async def check_health(self) -> None:
        """Serve's health check: fails when a worker is gone, so that Serve starts a new trainer.

        Raises:
            RuntimeError: a worker is gone.
        """
        await self._group.ping()

    async def process_ids(self) -> list[int]:
        """Of the workers, by rank."""
        return await self._group.process_ids()

    async def __del__(self) -> None:
        group: WorkerGroup | None = getattr(self, "_group", None)
        if group is None:
            return
        self._watch.cancel()
        # A version that is not written now is never written. The workers must end whatever fails here.
        with contextlib.suppress(Exception):
            await group.call(TrainerWorker.flush, FLUSH_TIMEOUT_S, timeout_s=FLUSH_TIMEOUT_S + 1.0)
        group.kill()

    async def _free_shared_memory(self) -> None:
        """Have the replicas close the GPU memory of a former trainer that they opened over CUDA IPC.

        It stays allocated until then, and this trainer's workers need it.
        """
        try:
            lease = await self._controller.acquire.remote(PUBLISHER)
            try:
                await self._controller.disconnect.remote(lease.token)
            finally:
                await self._controller.release.remote(lease.token)
        except SlipstreamError as error:  # another publisher holds the lease, or a round is not over yet
            logger.warning("GPU memory of a former trainer stays open in the replicas: %s", error)

    async def _publish(self, label: str | None) -> RoundReport:
        try:
            report = await self._run_round(label)
        except SlipstreamError as error:
            if not error.detail.get("send_again") and not error.detail.get("connect_again"):
                raise
            logger.warning("the round is sent again, to the replicas that are left: %s", error)
            report = await self._run_round(label)
        self._version, self._last_round = report.version, report
        await self._group.call(TrainerWorker.save_optimizer_state, timeout_s=self._step_timeout_s)
        return report

    async def _run_round(self, label: str | None) -> RoundReport:
        """Every rank takes part, and connects again if the membership has changed."""
        report = await self._group.call(TrainerWorker.publish, label, timeout_s=self._spec.publish_timeout_s)
        assert report is not None, "rank 0 reports every round that it completes"
        return report

    @contextlib.asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        async with self._queue:
            self._doing, self._since = name, time.monotonic()
            try:
                yield
            finally:
                self._doing = None
