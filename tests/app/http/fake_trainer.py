"""The trainer deployment's port: does everything at once, and refuses what the real one refuses."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import JsonValue

from deployments.protocol.errors import Conflict, InvalidRequest, OtherStep, RoundAborted
from deployments.protocol.publishing import RoundReport
from deployments.protocol.responses import AdapterReport, SavedCheckpoint, StepEntry, StepLog, TrainerStatus
from tests.app.http.fake_status import report

STATUS = TrainerStatus(
    step=3,
    version=4,
    doing="step",
    doing_s=0.5,
    strategy="single",
    world_size=1,
    transport="shm",
    parameters=1000,
    last_step={"loss": 0.5, "step": 3, "skipped": False},
    last_round=report(2, 4),
    stored_version=None,
    store_problem=None,
)


def adapter_report(version: int, label: str | None = None) -> AdapterReport:
    return AdapterReport(
        name="math",
        version=version,
        label=label,
        step=3,
        base_version=0,
        digest="d",
        size_bytes=1024,
        write_s=0.25,
        duration_s=0.5,
    )


class FakeTrainer:
    """Records what it received; a round with the label "aborts" is aborted, and version 2 is stored.

    Args:
        adapts: it trains an adapter, whose version 4 is live.
    """

    def __init__(self, *, adapts: bool = False) -> None:
        self._adapts = adapts
        self.received: list[Any] = []

    async def step(
        self,
        batch: Sequence[JsonValue] | bytes,
        settings: Mapping[str, JsonValue] | None,
        done: int | None,
        label: str | None,
    ) -> dict[str, float]:
        if label == "step 3":
            return {"loss": 0.25}
        if done not in (None, 3):
            raise OtherStep(f"expected a trainer after step {done}, got one after step 3", {"actual": 3})
        self.received.append(batch if settings is None else (batch, settings))
        if not batch:
            raise InvalidRequest("trajectories must be a non-empty list, got an empty list")
        return {"loss": 0.5}

    async def publish(
        self, label: str | None, step: int | None, after: int | None
    ) -> RoundReport | AdapterReport:
        self.received.append(label)
        if after not in (None, 4):
            raise Conflict(f"version 4 is committed, and these weights continue from version {after}")
        if step not in (None, 3):
            raise OtherStep(f"expected a trainer after step {step}, got one after step 3", {"actual": 3})
        if self._adapts:
            return adapter_report(5, label)
        if label == "aborts":
            raise RoundAborted("too few replicas staged")
        return report(2, 4, label)

    async def rollback(self, version: int) -> RoundReport:
        self.received.append(version)
        if self._adapts:
            raise InvalidRequest("this trainer trains the adapter 'math', and no versions of all weights")
        if version == 3:
            raise RoundAborted("too few replicas staged")
        if version != 2:
            raise InvalidRequest(f"version: expected one in the store [2], got {version}")
        return report(3, 5, f"rollback to {version}")

    async def save(self, path: str | None) -> SavedCheckpoint:
        self.received.append(path)
        return SavedCheckpoint(path="/tmp/checkpoint" if path is None else path, step=3, save_s=0.25)

    async def report(self, entry: StepEntry) -> None:
        self.received.append(entry)

    async def steps(self, after: float) -> StepLog:
        entries = [each for each in self.received if isinstance(each, StepEntry)]
        return StepLog(steps=[each for each in entries if each.step > after])

    async def status(self) -> TrainerStatus:
        if self._adapts:
            return replace(STATUS, version=0, last_round=None, adapter="math", adapter_version=4)
        return STATUS
