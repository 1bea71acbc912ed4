"""The trainer's version, and the rounds that move the fleet to its weights."""

import asyncio
from collections.abc import Collection

from deployments.calls.publish_session import ASK_AGAIN_S, PublishSession, outcome
from deployments.calls.rpc import CallHandle, retried
from deployments.host.logs import serve_logger
from deployments.protocol import errors
from deployments.protocol.publishing import RoundReport
from deployments.protocol.responses import FleetStatus
from deployments.trainer.spec import PUBLISHER, LoadedTrainer, TrainerSpec
from deployments.trainer.worker_group import STEP_TIMEOUT_S, WorkerGroup

SEND_ATTEMPTS = 3
logger = serve_logger()


class TrainerRounds:
    """Rounds of a trainer of all weights, one at a time.

    Attributes:
        version: of the weights that were loaded or published last.
        missed: why `version` is not the committed one, and what to do; None: it is.
        unanswered: the round whose close was not answered, and which may be committed.
    """

    def __init__(
        self, group: WorkerGroup, controller: CallHandle, spec: TrainerSpec, loaded: LoadedTrainer
    ) -> None:
        self._group = group
        self._controller = controller
        self._spec = spec
        self.version = loaded.version
        self.missed = loaded.missed
        self.last: RoundReport | None = None
        self.unanswered: int | None = None
        self._fleet_id = loaded.fleet_id
        self._untold: RoundReport | errors.SlipstreamError | None = None  # what became of it

    async def recall(self, labels: Collection[str]) -> None:
        """Repeating a predecessor's last publish, whose answer may be lost, returns the report of the round
        that made this version. `labels`: of its steps."""
        for report in await retried(self._controller, "rounds"):
            if (report.version, report.phase) == (self.version, "committed") and report.label in labels:
                self._untold = report

    def require_committed(self) -> None:
        if self.missed is not None:
            raise errors.Conflict(self.missed)

    async def publish(self, label: str | None, after: int | None = None) -> RoundReport:
        """Publish in place of version `after`; None: the trainer's own. If the round before is committed,
        unanswered and has this label, this is the same call again: its report is the answer."""
        settled = await self.outcome()
        if settled is not None and settled.label == label:
            return settled
        if after is None:
            self.require_committed()
        return await self.replace(label, self.version if after is None else after)

    async def outcome(self) -> RoundReport | None:
        """The report of a committed round whose close was not answered, once; else None. Raises Conflict (the
        fleet has no record), or as `settle`."""
        await self.settle()
        untold, self._untold = self._untold, None
        if isinstance(untold, errors.SlipstreamError):
            raise untold
        return untold

    async def settle(self) -> None:
        """Learn an unanswered round's outcome; adopt its version if it is committed. Raises FleetUnavailable:
        it is still running, or the controller does not answer."""
        if self.unanswered is None:
            return
        try:
            report = await self._ended(self.unanswered)
        except errors.FleetUnavailable:
            raise
        except errors.SlipstreamError as error:
            self.unanswered = None
            self._untold = None if isinstance(error, errors.RoundAborted) else error
            logger.warning("the last publish was not answered: %s", error.message)
            return
        logger.warning("the last publish was not answered: it is committed, as version %d", report.version)
        self._untold = report
        await self._group.call("adopt", report, timeout_s=STEP_TIMEOUT_S)
        await self._adopt(report)

    async def _ended(self, round_id: int) -> RoundReport:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._spec.publish_timeout_s
        while True:
            fleet = await retried(self._controller, "fleet")
            ended = await retried(self._controller, "rounds")
            report = outcome(round_id, self._fleet_id, fleet, ended)
            if report is not None:
                return report
            if loop.time() >= until:
                raise errors.FleetUnavailable(f"round {round_id} has not ended yet")
            await asyncio.sleep(ASK_AGAIN_S)

    async def replace(self, label: str | None, after: int | None = None) -> RoundReport:
        """Publish in place of version `after`; None: any."""
        for attempt in range(1, SEND_ATTEMPTS + 1):
            try:
                report = await self._run_round(label, after)
                break
            except errors.SlipstreamError as error:
                if attempt == SEND_ATTEMPTS or not _may_send_again(error):
                    raise
                logger.warning("sending the round again, to the remaining replicas: %s", error)
        await self._adopt(report)
        return report

    async def _adopt(self, report: RoundReport) -> None:
        self.version, self.last, self.missed, self.unanswered = report.version, report, None, None
        await self._group.call("save_checkpoint", timeout_s=STEP_TIMEOUT_S)

    async def _run_round(self, label: str | None, after: int | None) -> RoundReport:
        limit_s = self._spec.publish_timeout_s
        try:
            report: RoundReport = await self._group.call("publish", label, after, timeout_s=limit_s)
        except errors.AnswerLost as error:
            self.unanswered = error.detail["round_id"]
            raise
        except errors.FleetUnavailable:
            if self._group.broken is not None:  # else the fleet would wait for this trainer's successor
                await end_former_session(self._controller)
            raise
        return report


def _may_send_again(error: errors.SlipstreamError) -> bool:
    """A stale lease is renewed; if another publisher has it, that raises `Conflict`."""
    detail = error.detail
    return bool(detail.get("send_again") or detail.get("connect_again")) or isinstance(
        error, errors.StalePublisher
    )


_OPEN = "open"


async def end_former_session(controller: CallHandle, *, shares_memory: bool = False) -> None:
    """End the round and lease of a dead worker, which would block others until it expires: a new lease under
    the same name makes its token stale. A closed round is left alone: it may commit. `shares_memory`: the
    trainer's GPU memory stays allocated until the replicas disconnect."""
    try:
        if not shares_memory:
            fleet: FleetStatus = await retried(controller, "fleet")
            if fleet.lease is None or fleet.lease.publisher != PUBLISHER:
                return
            if fleet.round is not None and fleet.round.phase != _OPEN:
                return
        async with PublishSession(controller, PUBLISHER) as session:
            await session.acquire()
            if shares_memory:
                await session.disconnect()
    except errors.SlipstreamError as error:  # another publisher was faster, or the controller does not answer
        logger.warning("failed to end the session of a former trainer: %s", error)
