"""The trainer deployment: steps, publishes and saves, one at a time, in its group of workers.

    step, publish, save, rollback ──► one queue, first come first served ──► every rank
    status, check_health          ──► answered at once, also during a step

Steps and publishes change or read the same weights, so they take turns. Whoever calls waits in the
queue; nothing is refused for being early.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.errors import SlipstreamError
from deployments.logs import serve_logger
from deployments.trainer.lost_version import watch
from deployments.trainer.spec import PUBLISHER, TrainerSpec
from deployments.trainer.worker_group import WorkerGroup

FLUSH_TIMEOUT_S = 20.0
logger = serve_logger()


class Trainer:
    """Serve's deployment class of the trainer.

    Args:
        spec: what the workers are started with.
        controller: the fleet's controller.
        slots: whose GPUs the ranks share with the replicas; None: they have GPUs of their own.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, spec: TrainerSpec, controller: DeploymentHandle, slots: DeploymentHandle | None = None
    ) -> None:
        self._spec = spec
        self._controller = controller
        self._turn = asyncio.Lock()  # asyncio's lock is fair: first come, first served
        self._doing: str | None = None
        self._since = time.monotonic()
        self._last_step: dict[str, Any] = {}
        self._last_round: dict[str, Any] = {}
        plan = None if slots is None else await slots.plan.remote()
        if spec.transport == "ipc":
            await self._give_memory_back()
        self._group, loaded = await WorkerGroup.start(spec, controller, plan)
        self._parameters: int = loaded["parameters"]
        self._version: int = loaded["version"]  # the newest that this trainer has published or resumed from
        self._step: int = loaded["step"]
        self._watch = asyncio.create_task(watch(lambda: controller.fleet.remote(), self.publish))

    async def step(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """One optimizer step; `{"trajectories": [...]}`, see `trainers.trajectory`. Answers its metrics.

        Raises:
            InvalidRequest: the batch is not sound; nothing has changed.
        """
        async with self._alone("step"):
            metrics = dict(await self._call("step", batch, timeout_s=self._spec.step_timeout_s))
            self._step, self._last_step = int(metrics["step"]), metrics
            return metrics

    async def publish(self, label: str | None = None) -> dict[str, Any]:
        """Move the fleet to the weights as they are now; answers the round's report.

        Raises:
            RoundAborted: the fleet still serves what it served; try again.
        """
        async with self._alone("publish"):
            return await self._publish(label)

    async def rollback(self, version: int) -> dict[str, Any]:
        """Go back to the weights of a stored version, and publish them as an ordinary, newer one.

        If the round is aborted, the trainer has the old weights and the fleet has not: publish again.

        Raises:
            InvalidRequest: the version is not in the store.
        """
        async with self._alone("rollback"):
            await self._controller.rollback_source.remote(version)
            await self._call("load_version", version, timeout_s=self._spec.step_timeout_s)
            return await self._publish(f"rollback to {version}")

    async def save(self, path: str | None = None) -> dict[str, Any]:
        """Write the weights as an ordinary Hugging Face checkpoint directory on the trainer's host."""
        async with self._alone("save"):
            return dict(await self._call("save", path, timeout_s=self._spec.step_timeout_s))

    async def status(self) -> dict[str, Any]:
        return {
            "step": self._step,
            "version": self._version,
            "doing": self._doing,
            "doing_s": round(time.monotonic() - self._since, 3) if self._doing is not None else 0.0,
            "strategy": str(self._spec.strategy),
            "world_size": self._spec.world_size,
            "transport": self._spec.transport,
            "parameters": self._parameters,
            "last_step": self._last_step,
            "last_round": self._last_round,
            **await self._group.control("store_status"),
        }

    async def check_health(self) -> None:
        """Serve's health check: fails when a worker is gone, so that Serve starts a new trainer."""
        await self._group.ping()

    async def process_ids(self) -> list[int]:
        """Of the workers."""
        return await self._group.process_ids()

    async def __del__(self) -> None:
        group: WorkerGroup | None = getattr(self, "_group", None)
        if group is None:
            return
        self._watch.cancel()
        # What is not written then is written never; whatever fails here, the workers must go.
        with contextlib.suppress(Exception):
            await group.call("flush", FLUSH_TIMEOUT_S, timeout_s=FLUSH_TIMEOUT_S + 1.0)
        group.kill()

    async def _give_memory_back(self) -> None:
        """Have the replicas close what they have opened of a former trainer's GPU memory: it is not free
        before that, and this one's workers need it."""
        try:
            lease = await self._controller.acquire.remote(PUBLISHER)
            try:
                await self._controller.disconnect.remote(lease.token)
            finally:
                await self._controller.release.remote(lease.token)
        except SlipstreamError as error:  # somebody else publishes, or a round is not over yet
            logger.warning("memory that replicas share with a former trainer is not given back: %s", error)

    async def _publish(self, label: str | None) -> dict[str, Any]:
        try:
            report = await self._send(label)
        except SlipstreamError as error:
            if not error.detail.get("send_again") and not error.detail.get("connect_again"):
                raise
            logger.warning("the round is sent again, to those who are there now: %s", error)
            report = await self._send(label)
        self._version, self._last_round = int(report["version"]), report
        await self._call("keep_optimizer_state", timeout_s=self._spec.step_timeout_s)
        return report

    async def _send(self, label: str | None) -> dict[str, Any]:
        """One round: every rank takes part, and connects anew if the membership has changed."""
        return dict(await self._call("publish", label, timeout_s=self._spec.publish_timeout_s))

    async def _call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return await self._group.call(method, *args, timeout_s=timeout_s)

    @contextlib.asynccontextmanager
    async def _alone(self, what: str) -> AsyncIterator[None]:
        async with self._turn:
            self._doing, self._since = what, time.monotonic()
            try:
                yield
            finally:
                self._doing = None
