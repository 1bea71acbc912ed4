"""The trainer deployment: steps, publishes, saves and rollbacks, one at a time, in its group of workers.
Status and health are answered at once, also during a step."""

import asyncio
import contextlib
import contextvars
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import JsonValue
from ray.serve.handle import DeploymentHandle

from deployments.calls.rpc import CallAddress, CallHandle, CallServer, retried
from deployments.host import tracing
from deployments.host.logs import serve_logger
from deployments.protocol import responses
from deployments.protocol.errors import Conflict, InvalidRequest, OtherStep
from deployments.protocol.poll import Scores
from deployments.protocol.publishing import RoundReport
from deployments.serve.instruments import STEP, STEPS, Record, record
from deployments.trainer.spec import LABELS_KEPT, LoadedTrainer, TrainerSpec
from deployments.trainer.trainer_rounds import TrainerRounds, end_former_session
from deployments.trainer.worker_group import PING_TIMEOUT_S, STEP_TIMEOUT_S, WorkerGroup
from deployments.weights.transports.registry import TRANSPORTS, SameGpu

Result = TypeVar("Result")
logger = serve_logger()


class SerialQueue:
    """Runs calls one at a time, first come first served. A started call runs to its end, in a context of its
    own: Serve cancels the calls of a caller that disconnects, and workers cannot stop in a step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = asyncio.Lock()
        self._since = 0.0
        self.doing: str | None = None

    @property
    def doing_s(self) -> float:
        return round(self._clock() - self._since, 3) if self.doing is not None else 0.0

    async def run(self, name: str, work: Callable[[], Awaitable[Result]]) -> Result:
        await self._lock.acquire()
        task = asyncio.create_task(self._run(name, work, tracing.headers()), context=contextvars.Context())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                logger.warning("the caller of %r disconnected; the trainer continues with it", name)
                task.add_done_callback(_log_failure)
            raise

    async def _run(
        self, name: str, work: Callable[[], Awaitable[Result]], trace: Mapping[str, str]
    ) -> Result:
        self.doing, self._since = name, self._clock()
        try:
            with tracing.span(name, trace):
                return await work()
        finally:
            self.doing = None
            self._lock.release()


def _log_failure(task: "asyncio.Task[Any]") -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.warning("a call whose caller disconnected has failed: %s", error)


CHECK_PERIOD_S = 5.0
CONFIRMATIONS = 3  # a write to the store may still complete


def is_lost(fleet: responses.FleetStatus) -> bool:
    """Whether joiners wait for a version that neither a replica nor the store holds."""
    committed = fleet.committed_version
    joiners = [member for member in fleet.members if member.state == "joining"]
    holders = [member for member in fleet.members if member.admitted or member.version == committed]
    in_store = committed == 0 or fleet.stored_version == committed
    return bool(joiners) and not holders and not in_store and fleet.round is None


def is_starved(fleet: responses.FleetStatus, published: int) -> bool:
    """Whether joiners wait for a version that could not be stored. False for another publisher's version: the
    trainer's weights would replace it."""
    waiting = any(member.state == "joining" for member in fleet.members)
    own = fleet.committed_version == published
    return own and waiting and fleet.store_problem is not None and fleet.round is None


def check_version_0(fleet: responses.FleetStatus, loaded: LoadedTrainer) -> None:
    """Raises Conflict if version 0 is not the model that this trainer began with."""
    if fleet.committed_version == 0 and fleet.initial not in (None, loaded.initial):
        has = "weights that cannot be identified" if loaded.initial is None else loaded.initial
        raise Conflict(
            f"version 0 of this fleet is {fleet.initial}, and its trainer began with {has}: restore 'model', "
            "and restart the trainer"
        )


async def watch(
    fleet_status: Callable[[], Awaitable[responses.FleetStatus]],
    publish: Callable[[str, int], Awaitable[object]],
    published: Callable[[], int],
    settle: Callable[[], Awaitable[object]],
    period_s: float = CHECK_PERIOD_S,
) -> None:
    """Publish again when replicas wait for a committed version that they cannot get: the store is written
    after the commit, and all replicas may die before. Runs until cancelled.

    `settle` learns the outcome of a publish whose answer was lost.
    """
    lost_checks = 0
    while True:
        await asyncio.sleep(period_s)
        try:
            await settle()
            fleet = await fleet_status()
            lost = is_lost(fleet)
            lost_checks = lost_checks + 1 if lost or is_starved(fleet, published()) else 0
            if lost_checks >= CONFIRMATIONS:
                lost_checks = 0
                committed, own = fleet.committed_version, published()
                what = f"version {committed} {'was lost' if lost else 'was not stored'}"
                which = "anew" if own == committed else f"version {own} in its place"
                logger.warning("%s, and replicas wait for it: publishing %s", what, which)
                await publish(what, committed)
        except Exception as error:  # the controller is unreachable or the round failed: check again later
            logger.debug("cannot check the fleet: %s", error)


class StepHistory:
    """The newest steps; the last few keep their rollouts."""

    def __init__(
        self, steps: int = 2000, with_rollouts: int = 10, clock: Callable[[], float] = time.time
    ) -> None:
        self._entries: deque[responses.StepEntry] = deque(maxlen=steps)
        self._with_rollouts = with_rollouts
        self._clock = clock

    def add(self, entry: responses.StepEntry) -> None:
        """Times increase, even if the clock is set back."""
        entries = self._entries
        last = entries[-1].at if entries else 0.0
        entries.append(replace(entry, at=round(max(self._clock(), last + 0.001), 3)))
        if len(entries) > self._with_rollouts:
            entries[-1 - self._with_rollouts] = replace(entries[-1 - self._with_rollouts], rollouts=())

    def after(self, at: float) -> list[responses.StepEntry]:
        return [entry for entry in self._entries if entry.at > at]


def count_step(entry: responses.StepEntry, record: Record = record) -> None:
    if not entry.run:
        record(STEPS)
    for name, value in entry.values.items():
        if value is not None and math.isfinite(value):
            figure = name.encode("ascii", "backslashreplace").decode()  # Ray's labels are ASCII
            record(STEP, float(value), source="job" if entry.run else "trainer", figure=figure)


FLUSH_TIMEOUT_S = 300.0  # the version being written is on no other disk
STOP_TIMEOUT_S = FLUSH_TIMEOUT_S + 10.0  # Serve waits a few seconds for calls first


class Trainer:
    """`slots`: GPUs that ranks and replicas share. Raises FleetUnavailable: a worker died, or did not load in
    time."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        spec: TrainerSpec,
        controller: DeploymentHandle,
        slots: DeploymentHandle | None = None,
        *,
        ping_timeout_s: float = PING_TIMEOUT_S,
    ) -> None:
        self._spec = spec
        self._controller = fleet = CallHandle(controller)
        self._queue = SerialQueue()
        self._calls = CallServer(self)
        self._last_step: responses.StepMetrics = {}
        self._history = StepHistory()
        self._lora = spec.config.published_adapter
        self._last_adapter: responses.AdapterReport | None = None
        plan = None if slots is None else await retried(slots, "plan")
        if self._lora is None:
            shares_memory = TRANSPORTS[spec.transport].same_gpu is SameGpu.POSSIBLE
            await end_former_session(fleet, shares_memory=shares_memory)
        self._group, self._loaded = await WorkerGroup.start(spec, fleet, plan, ping_timeout_s=ping_timeout_s)
        self._rounds = TrainerRounds(self._group, fleet, spec, self._loaded)
        self._step = self._loaded.step
        self._made: dict[str, responses.StepMetrics] = {}  # keys: label; the newest ones
        self._know(self._loaded.labels)
        self._published: dict[
            str | None, RoundReport | responses.AdapterReport
        ] = {}  # keys: label; since the newest step
        self._adapter_version = self._loaded.adapter_version
        self._proving: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        if self._lora is None:
            await self._rounds.recall(self._loaded.labels)
            self._watch = asyncio.create_task(
                watch(
                    lambda: retried(fleet, "fleet"),
                    lambda label, after: self.publish(label, after=after),
                    lambda: self._rounds.version,
                    self._settle,
                )
            )

    async def step(
        self,
        trajectories: Sequence[JsonValue] | bytes,
        settings: Mapping[str, JsonValue] | None = None,
        done: int | None = None,
        label: str | None = None,
    ) -> responses.StepMetrics:
        """One optimizer step on trajectories, JSON or `trainers.trajectory_arrays`; returns its metrics.

        Args:
            settings: `trainers.settings.StepSettings` of this step; arrays have them in their metadata.
            done: optimizer steps expected to be done; None: any number.
            label: the caller's name of the step, under which it publishes too. The same call again learns
                nothing, and returns the metrics of the step that was made.

        Raises:
            InvalidRequest: the batch is malformed; nothing has changed.
            OtherStep: another number was done.
            Conflict: the trainer has an older version than the fleet.
            FleetUnavailable: a worker was lost; the trainer is being restarted.
        """
        return await self._queue.run("step", lambda: self._learn(trajectories, settings, done, label))

    async def publish(
        self, label: str | None = None, step: int | None = None, after: int | None = None
    ) -> RoundReport | responses.AdapterReport:
        """Move the fleet to the current weights; an adapter becomes the next version of its name.

        Args:
            step: optimizer steps expected to be done; None: any number. The same call again, with its label,
                returns the former report.
            after: the version that is replaced; None: this trainer's. Not for adapters.

        Raises:
            OtherStep: another number was done.
            RoundAborted: the fleet still serves the old version; try again.
            InvalidRequest: the replicas rejected the adapter.
            AnswerLost: the round may be committed. The same call made again returns its report.
            Conflict: another version is committed, or others loaded the adapter's name.
            FleetUnavailable: no replica can take part, or a worker was lost.
        """

        async def work() -> RoundReport | responses.AdapterReport:
            self._require_done(step)
            if step is not None and (made := self._published.get(label)) is not None:
                return made
            if self._rounds.version == 0 and after is None:
                check_version_0(await retried(self._controller, "fleet"), self._loaded)
            if self._lora is not None:
                if after is not None:
                    raise InvalidRequest("after: expected none, because this trainer publishes an adapter")
                report: RoundReport | responses.AdapterReport = await self._publish_adapter(label)
            else:
                report = self._prove(await self._rounds.publish(label, after))
            if step is not None:
                self._published[label] = report
            return report

        return await self._queue.run("publish", work)

    async def rollback(self, version: int) -> RoundReport:
        """Load a stored version, and publish it as a newer one. Raises InvalidRequest (not in the store, or
        an adapter is trained), RoundAborted (the trainer has the stored weights, the fleet has not; roll
        back again) or FleetUnavailable."""
        if self._lora is not None:
            raise InvalidRequest(
                f"this trainer trains the adapter {self._lora.name!r}, and no versions of all weights: "
                "publish the stored version's directory with /fleet/publish, or name an older version of the "
                "adapter"
            )
        return await self._queue.run("rollback", lambda: self._go_back(version))

    async def save(self, path: str | None = None) -> responses.SavedCheckpoint:
        """Write a Hugging Face checkpoint, or an adapter in peft's format, on the trainer's host. Raises
        InvalidRequest or FleetUnavailable."""
        return await self._queue.run("save", lambda: self._group.call("save", path, timeout_s=STEP_TIMEOUT_S))

    async def report(self, entry: responses.StepEntry) -> None:
        """A job's step, for the page."""
        self._add(entry)

    async def steps(self, after: float = 0.0) -> responses.StepLog:
        return responses.StepLog(steps=self._history.after(after))

    async def status(self) -> responses.TrainerStatus:
        """Raises FleetUnavailable if rank 0 does not answer."""
        store = await self._group.store_status()
        return responses.TrainerStatus(
            step=self._step,
            version=self._rounds.version,
            doing=self._queue.doing,
            doing_s=self._queue.doing_s,
            strategy=str(self._spec.config.strategy),
            world_size=self._spec.config.world_size,
            transport=self._spec.transport,
            parameters=self._loaded.parameters,
            last_step=self._last_step,
            last_round=self._rounds.last,
            stored_version=store.stored_version,
            store_problem=store.store_problem,
            untrained=tuple(self._loaded.untrained),
            adapter=None if self._lora is None else self._lora.name,
            adapter_version=self._adapter_version,
            missed=self._rounds.missed,
            last_adapter=self._last_adapter,
        )

    async def call_address(self) -> CallAddress:
        return await self._calls.address()

    async def check_health(self) -> None:
        """Fails when a worker is gone; Serve then starts a new trainer."""
        await self._group.ping()

    async def process_ids(self) -> list[int]:
        return await self._group.process_ids()

    async def __del__(self) -> None:
        group: WorkerGroup | None = getattr(self, "_group", None)
        if group is None:
            return
        if self._watch is not None:
            self._watch.cancel()
        # What is not written now never will be. The workers must exit in any case.
        with contextlib.suppress(Exception):
            await group.flush(FLUSH_TIMEOUT_S)
        group.kill()

    def _require_done(self, step: int | None) -> None:
        if step not in (None, self._step):
            raise OtherStep(
                f"expected a trainer after step {step}, got one after step {self._step}: nothing was done",
                {"expected": step, "actual": self._step},
            )

    async def _learn(
        self,
        trajectories: Sequence[JsonValue] | bytes,
        settings: Mapping[str, JsonValue] | None,
        done: int | None,
        label: str | None,
    ) -> responses.StepMetrics:
        if label is not None and (made := self._made.get(label)) is not None:
            return made
        self._require_done(done)
        await self._rounds.outcome()
        self._rounds.require_committed()
        published = self._rounds.version if self._lora is None else self._adapter_version
        metrics: responses.StepMetrics = await self._group.call(
            "step", trajectories, published, settings, label, timeout_s=STEP_TIMEOUT_S
        )
        step = metrics["step"]
        assert step is not None, "a number of steps is finite"
        self._step, self._last_step = int(step), metrics
        self._published.clear()
        if label is not None:
            self._made[label] = metrics
            if len(self._made) > LABELS_KEPT:
                del self._made[next(iter(self._made))]
        self._add(responses.StepEntry(run="", step=self._step, values=metrics))
        return metrics

    def _add(self, entry: responses.StepEntry) -> None:
        self._history.add(entry)
        count_step(entry)

    def _know(self, labels: Sequence[str]) -> None:
        """Only these steps are in the weights; their metrics are unknown."""
        self._made = {label: {"step": self._step} for label in labels}

    async def _go_back(self, version: int) -> RoundReport:
        label = f"rollback to {version}"
        settled = await self._rounds.outcome()
        if settled is not None and settled.label == label:
            return settled
        if self._spec.store_keep is None:  # else the trainer's host has it, or a replica gives it
            await retried(self._controller, "rollback_source", version)
        self._know(await self._group.call("load_version", version, timeout_s=STEP_TIMEOUT_S))
        self._published.clear()
        return self._prove(await self._rounds.replace(label))

    def _prove(self, report: RoundReport) -> RoundReport:
        """Score the published weights after the answer, unless a step comes first."""
        if self._spec.proof_sequences:
            self._proving = asyncio.create_task(self._send_scores(report.version, self._step))
        return report

    async def _send_scores(self, version: int, step: int) -> None:
        async def work() -> tuple[float, ...] | None:
            if (self._rounds.version, self._step) != (version, step):
                return None
            return await self._group.call("score", timeout_s=STEP_TIMEOUT_S)

        try:
            values = await self._queue.run("score", work)
            if values is not None:
                scores = Scores(version=version, values=values)
                await retried(self._controller, "set_scores", scores)
        except Exception as error:  # the fleet does not wait for it; the next call finds a lost worker
            logger.warning("no proof of version %d by the trainer: %s", version, error)

    async def _settle(self) -> None:
        if self._rounds.unanswered:
            await self._queue.run("publish", self._rounds.settle)

    async def _publish_adapter(self, label: str | None) -> responses.AdapterReport:
        limit_s = self._spec.publish_timeout_s
        report: responses.AdapterReport = await self._group.call("publish", label, timeout_s=limit_s)
        self._adapter_version, self._last_adapter = report.version, report
        await self._group.call("save_checkpoint", timeout_s=STEP_TIMEOUT_S)
        return report
