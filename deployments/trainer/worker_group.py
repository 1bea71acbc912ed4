"""The trainer's processes: one Ray actor a rank, outside the Serve replica, alive as long as it is.

They are not detached: Ray ends them when their owner, the Serve replica's process, is gone, however
that happened. A step does not run in the replica's own process because Serve's health checks and
calls share it.
"""

import asyncio
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.serve.handle import DeploymentHandle
from ray.util.placement_group import get_placement_group

from deployments.errors import FleetUnavailable, SlipstreamError
from deployments.logs import serve_logger
from deployments.placement import SlotPlan, in_bundle
from deployments.trainer.spec import TrainerSpec
from deployments.trainer.worker import TrainerWorker

PING_TIMEOUT_S = 30.0
# After one rank has failed, the others may wait in a collective for good.
STRAGGLER_S = 10.0
# A second concurrency group, so that a ping is answered during a step; the first has one thread.
_ACTOR = ray.remote(concurrency_groups={"control": 1})(TrainerWorker)
logger = serve_logger()


class WorkerGroup:
    """Calls a method on every rank and answers what rank 0 does."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers = list(workers)
        self.broken: str | None = None

    @classmethod
    async def start(
        cls, spec: TrainerSpec, controller: DeploymentHandle, slots: SlotPlan | None = None
    ) -> tuple["WorkerGroup", Any]:
        """Start the ranks; returns when all of them have loaded the model, with rank 0's answer.

        Args:
            slots: the ranks share its GPUs with the replicas, rank r that of bundle r; None: Ray
                gives each rank its own.
        """
        incarnation = uuid.uuid4().hex[:8]
        group = cls(
            [
                _ACTOR.options(
                    name=f"slipstream-trainer-{incarnation}-{rank}", **resources(spec, rank, slots)
                ).remote(spec, rank, controller)
                for rank in range(spec.world_size)
            ]
        )
        try:
            # Reserved GPUs may be held by a group that is just ending, but not for good.
            async with asyncio.timeout(spec.start_timeout_s):
                meeting_point = await group._workers[0].meeting_point.remote()
            loaded = await group.call("load", meeting_point, timeout_s=spec.start_timeout_s)
        except BaseException:  # a start that is cut short must not leave workers behind
            group.kill()
            raise
        return group, loaded

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Run a method on every rank.

        Raises:
            SlipstreamError: a worker raised it.
            FleetUnavailable: a worker died, or did not answer in time; the group is broken then.
        """
        if self.broken is not None:
            raise FleetUnavailable(f"the trainer is being restarted: {self.broken}")
        calls = [
            asyncio.ensure_future(_answer(getattr(worker, method).remote(*args))) for worker in self._workers
        ]
        try:
            done, pending = await asyncio.wait(calls, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            waited_s = timeout_s
            if pending and any(call.exception() for call in done):
                _, pending = await asyncio.wait(pending, timeout=STRAGGLER_S)
                waited_s = STRAGGLER_S
            failures = {rank: call.exception() for rank, call in enumerate(calls) if call not in pending}
            lost = {rank: type(error).__name__ for rank, error in failures.items() if _is_loss(error)}
            late = [rank for rank, call in enumerate(calls) if call in pending]
            if lost or late:
                self.broken = _sentence(method, lost, late, waited_s, failures)
                raise FleetUnavailable(f"{self.broken}; the trainer is restarted from the store")
            answers = [call.result() for call in calls]  # each: whatever a rank raised comes out
            return answers[0]
        except RayTaskError as error:
            raise _cause(error) from None
        finally:
            for call in calls:
                call.cancel()

    async def ping(self) -> None:
        """Raises RuntimeError if a worker is gone."""
        if self.broken is None:
            try:
                pings = [_answer(worker.process_id.remote()) for worker in self._workers]
                await asyncio.wait_for(asyncio.gather(*pings), PING_TIMEOUT_S)
            except (RayError, TimeoutError) as error:
                self.broken = f"a worker does not answer: {type(error).__name__}"
        if self.broken is not None:
            raise RuntimeError(f"the trainer's worker group is broken: {self.broken}")

    async def control(self, method: str) -> Any:
        """Ask rank 0 something that it answers also during a step."""
        try:
            return await asyncio.wait_for(_answer(getattr(self._workers[0], method).remote()), PING_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            raise FleetUnavailable(f"the trainer's rank 0 does not answer: {type(error).__name__}") from error

    async def process_ids(self) -> list[int]:
        return list(await asyncio.gather(*[_answer(w.process_id.remote()) for w in self._workers]))

    def kill(self) -> None:
        for worker in self._workers:
            ray.kill(worker)


def resources(spec: TrainerSpec, rank: int, slots: SlotPlan | None) -> dict[str, Any]:
    """The options of a rank's actor: its GPU, and the threads of its process."""
    threads = spec.cpu_threads if spec.cpu_threads > 0 else os.cpu_count() or 1
    chosen: dict[str, Any] = {
        "num_cpus": 0,
        "num_gpus": spec.gpus_per_rank if spec.device == "cuda" else 0,
        "max_restarts": 0,
        # Ray sets OMP_NUM_THREADS to 1 in an actor that reserves no CPU, so that torch would leave all
        # cores but one idle. It counts for every thread of the process, which torch.set_num_threads
        # does not.
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads)}},
    }
    if slots is not None:
        group = get_placement_group(slots.name)
        chosen |= {"num_gpus": slots.trainer_share, "scheduling_strategy": in_bundle(group, rank)}
    return chosen


async def _answer(reference: Any) -> Any:
    return await reference


def _is_loss(error: BaseException | None) -> bool:
    """Its actor died; or Ray ended it for want of memory, which is another class."""
    return isinstance(error, RayError) and not isinstance(error, RayTaskError)


def _sentence(
    method: str,
    lost: Mapping[int, str],
    late: Sequence[int],
    waited_s: float,
    failures: Mapping[int, BaseException | None],
) -> str:
    parts = [f"rank {rank} of the trainer died during {method!r} ({kind})" for rank, kind in lost.items()]
    if late:
        parts.append(f"ranks {list(late)} did not finish {method!r} within {waited_s:g} s")
    raised = {rank: error for rank, error in failures.items() if isinstance(error, RayTaskError)}
    parts += [f"rank {rank} raised {_cause(error)}" for rank, error in raised.items()]
    return "; ".join(parts)


def _cause(error: BaseException) -> BaseException:
    """What was raised in the worker, out of the layers that Ray puts around it."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        if isinstance(error.cause, SlipstreamError) and not isinstance(error.cause, RayTaskError):
            return type(error.cause)(error.cause.message, error.cause.detail)
        error = error.cause
    return error
