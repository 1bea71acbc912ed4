"""One Ray actor per trainer rank. Steps do not run in the Serve replica's process, which answers health
checks. Ray kills the actors when that process, their owner, dies."""

import asyncio
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import get_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.calls.rpc import CallHandle
from deployments.host import tracing
from deployments.host.fork_server.use import forked_worker
from deployments.host.logs import serve_logger
from deployments.protocol.errors import FleetUnavailable, SlipstreamError
from deployments.serve.placement import SlotPlan, in_bundle
from deployments.trainer.spec import LoadedTrainer, StoreStatus, TrainerSpec

if TYPE_CHECKING:
    from deployments.trainer.adapter_worker import AdapterWorker
    from deployments.trainer.worker import TrainerWorker

PING_TIMEOUT_S = 20.0  # below Serve's own limit, so the reason is known when it replaces the trainer
START_TIMEOUT_S = 1800.0  # includes the download of a model
# A step, a save or a rollback; NCCL ends a collective that hangs before.
STEP_TIMEOUT_S = 1800.0
STRAGGLER_S = 10.0  # after one rank failed, the others may hang in a collective

logger = serve_logger()


class TrainerWorkerActor:
    """Only this process imports the workers, hence torch and vLLM. All calls but `call` are answered during a
    step."""

    _worker: "TrainerWorker | AdapterWorker"

    def __init__(self, spec: TrainerSpec, rank: int, controller: CallHandle) -> None:
        if spec.config.published_adapter is None:
            from deployments.trainer.worker import TrainerWorker

            self._worker = TrainerWorker(spec, rank, controller)
        else:
            from deployments.trainer.adapter_worker import AdapterWorker

            self._worker = AdapterWorker(spec, rank, controller)

    def call(self, trace: Mapping[str, str], method: str, *args: Any) -> Any:
        with tracing.span(method, trace):
            return getattr(self._worker, method)(*args)

    @ray.method(concurrency_group="control")
    def process_id(self) -> int:
        return os.getpid()

    @ray.method(concurrency_group="control")
    def store_status(self) -> StoreStatus:
        return self._worker.store_status()

    @ray.method(concurrency_group="control")
    def flush(self, timeout_s: float) -> bool:
        return self._worker.flush(timeout_s)

    @ray.method(concurrency_group="control")
    def flush_version(self, timeout_s: float) -> bool:
        return self._worker.flush_version(timeout_s)


# A ping is answered during a step; the default group has one thread.
_ACTOR = ray.remote(concurrency_groups={"control": 1})(TrainerWorkerActor)


class WorkerGroup:
    """A call runs on every rank and returns what rank 0 returns."""

    def __init__(self, workers: Sequence[Any], *, ping_timeout_s: float = PING_TIMEOUT_S) -> None:
        self._workers = list(workers)
        self._ping_timeout_s = ping_timeout_s
        self.broken: str | None = None  # why the group can no longer be used

    @classmethod
    async def start(
        cls,
        spec: TrainerSpec,
        controller: CallHandle,
        slots: SlotPlan | None = None,
        *,
        ping_timeout_s: float = PING_TIMEOUT_S,
    ) -> tuple["WorkerGroup", LoadedTrainer]:
        """Start the ranks, and wait until all have loaded the model. `slots`: rank r shares the GPU of bundle
        r with a replica. Raises FleetUnavailable (a rank died, or did not load in time) or TimeoutError (Ray
        did not start rank 0 in time)."""
        incarnation = uuid.uuid4().hex[:8]
        group = cls(
            [
                _ACTOR.options(
                    name=f"slipstream-trainer-{incarnation}-{rank}", **resources(spec, rank, slots)
                ).remote(spec, rank, controller)
                for rank in range(spec.config.world_size)
            ],
            ping_timeout_s=ping_timeout_s,
        )
        try:
            # An exiting worker group may still hold the GPUs.
            async with asyncio.timeout(START_TIMEOUT_S):
                address = await group._workers[0].call.remote({}, "rendezvous_address")
            loaded = await group.call("load", address, timeout_s=START_TIMEOUT_S)
        except BaseException:  # a cancelled start must not leave workers behind
            group.kill()
            raise
        return group, loaded

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Raises a worker's SlipstreamError, or FleetUnavailable: a worker died or timed out, and the group
        is broken."""
        if self.broken is not None:
            raise FleetUnavailable(f"the trainer is being restarted: {self.broken}")
        trace = tracing.headers()
        calls = [
            asyncio.ensure_future(_result(worker.call.remote(trace, method, *args)))
            for worker in self._workers
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
                self.broken = _join_reasons(method, lost, late, waited_s, failures)
                raise FleetUnavailable(f"{self.broken}; the trainer is restarted from the store")
            results = [call.result() for call in calls]
            return results[0]
        except RayTaskError as error:
            raise _cause(error) from None
        finally:
            for call in calls:
                call.cancel()

    async def ping(self) -> None:
        """Raises RuntimeError if a worker is gone or hangs."""
        if self.broken is None:
            problems = await self._silent()
            if problems and self.broken is None:
                self.broken = "; ".join(problems)
                logger.error("replacing the trainer, which resumes from the store: %s", self.broken)
        if self.broken is not None:
            raise RuntimeError(f"the trainer's worker group is broken: {self.broken}")

    async def _silent(self) -> list[str]:
        pings = [asyncio.ensure_future(_result(worker.process_id.remote())) for worker in self._workers]
        await asyncio.wait(pings, timeout=self._ping_timeout_s)
        problems = []
        for rank, ping in enumerate(pings):
            if not ping.done():
                ping.cancel()
                problems.append(f"rank {rank} has not answered for {self._ping_timeout_s:g} s")
            elif isinstance(error := ping.exception(), RayError):
                problems.append(f"rank {rank} is gone ({type(error).__name__})")
            elif error is not None:
                raise error
        return problems

    async def store_status(self) -> StoreStatus:
        try:
            status = _result(self._workers[0].store_status.remote())
            return cast(StoreStatus, await asyncio.wait_for(status, self._ping_timeout_s))
        except (RayError, TimeoutError) as error:
            raise FleetUnavailable(f"the trainer's rank 0 does not answer: {type(error).__name__}") from error

    async def flush(self, timeout_s: float) -> None:
        """Wait until the version and the checkpoint are written, but not for a running step. A broken group
        writes no checkpoint, but its rank 0 may hold the only copy of a version. Raises RayError,
        TimeoutError or FleetUnavailable: rank 0 is lost."""
        await self.store_status()  # it answers quickly, or never
        if self.broken is None:
            writes = [_result(each.flush.remote(timeout_s)) for each in self._workers]
        else:
            writes = [_result(self._workers[0].flush_version.remote(timeout_s))]
        await asyncio.wait_for(asyncio.gather(*writes), timeout_s + 1.0)

    async def process_ids(self) -> list[int]:
        """By rank. Raises TimeoutError if a rank hangs."""
        async with asyncio.timeout(self._ping_timeout_s):
            return list(await asyncio.gather(*[_result(each.process_id.remote()) for each in self._workers]))

    def kill(self) -> None:
        for worker in self._workers:
            ray.kill(worker)


def resources(spec: TrainerSpec, rank: int, slots: SlotPlan | None) -> dict[str, Any]:
    threads = max(1, (os.cpu_count() or 1) // (spec.config.world_size if spec.device == "cpu" else 1))
    # Ray sets OMP_NUM_THREADS to 1 in an actor without CPUs, and torch.set_num_threads would not reach every
    # thread.
    environment = {"OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "WARNING"}
    job = ray.get_runtime_context().runtime_env if ray.is_initialized() else {}
    options: dict[str, Any] = {
        "num_cpus": 0,
        "num_gpus": spec.config.gpus_per_rank if spec.device == "cuda" else 0,
        "max_restarts": 0,
        "runtime_env": {"env_vars": environment, **forked_worker(job)},
    }
    if spec.device == "cpu":
        # Beside this process. Ray places an actor that asks for nothing on any host, a soft affinity or not.
        here = ray.get_runtime_context().get_node_id()
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=False)
    if slots is not None:
        group = get_placement_group(slots.name)
        options |= {"num_gpus": slots.trainer_share, "scheduling_strategy": in_bundle(group, rank)}
    return options


async def _result(reference: Any) -> Any:
    return await reference


def _is_loss(error: BaseException | None) -> bool:
    """Ray raises another class if it killed the actor for lack of memory."""
    return isinstance(error, RayError) and not isinstance(error, RayTaskError)


def _join_reasons(
    method: str,
    lost: Mapping[int, str],
    late: Sequence[int],
    waited_s: float,
    failures: Mapping[int, BaseException | None],
) -> str:
    reasons = [f"rank {rank} of the trainer died during {method!r} ({kind})" for rank, kind in lost.items()]
    if late:
        reasons.append(f"ranks {list(late)} did not finish {method!r} within {waited_s:g} s")
    raised = {rank: error for rank, error in failures.items() if isinstance(error, RayTaskError)}
    reasons += [f"rank {rank} raised {_cause(error)}" for rank, error in raised.items()]
    return "; ".join(reasons)


def _cause(error: BaseException) -> BaseException:
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        if isinstance(error.cause, SlipstreamError) and not isinstance(error.cause, RayTaskError):
            return type(error.cause)(error.cause.message, error.cause.detail)
        error = error.cause
    return error
