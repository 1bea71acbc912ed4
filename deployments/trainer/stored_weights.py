"""The stored versions that a trainer may load: its own fleet's, with the committed bytes. Rank 0 reads and
compares them, and takes what its host lacks from a replica, if hosts share no store; all ranks load the same
one, or none does."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from deployments.protocol.poll import StoredVersion
from deployments.protocol.responses import FleetStatus
from deployments.weights.store.version_fetcher import QUIET_S, require_version
from deployments.weights.store.versions import Store

STORE_WAIT_S = 60.0
HOLDER_WAIT_S = 240.0  # the fleet may start along with the trainer
RETRY_S = 0.5
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    version: int  # 0: the model
    committed: int
    problem: str  # why the committed one cannot be loaded; empty: it can


class StoredWeights:
    """Every rank makes every call.

    Args:
        told: what the controller says of a version at a path.
        shared: hosts share the store.
    """

    def __init__(
        self, store: Store, rank: int, told: Callable[[int, str], StoredVersion], *, shared: bool
    ) -> None:
        self._store = store
        self._rank = rank
        self._told = told
        self._shared = shared

    def find(self, fleet: Callable[[], FleetStatus]) -> Found:
        """The committed version; if it is unusable or not stored in time, the newest usable one before it.
        Raises ValueError if some are stored but none is usable."""
        committed, stored, problem = self._on_rank_0(lambda: self._once_usable(fleet))
        if problem is None:
            return Found(version=committed, committed=committed, problem="")
        problems = [problem]
        for version in reversed([each for each in stored if each < committed]):
            if (problem := self.problem(version)) is None:
                return Found(version=version, committed=committed, problem="; ".join(problems))
            problems.append(problem)
        if stored:
            raise ValueError(
                f"no version in {self._store.directory} can be used: {'; '.join(problems)}; move them "
                "away to start from the model again"
            )
        return Found(version=0, committed=committed, problem=problems[0])

    def problem(self, version: int) -> str | None:
        """None: the version can be used. An absent or damaged one is fetched if a replica has it now."""
        return self._on_rank_0(lambda: _problem(self._where(version), quiet_s=0.0))

    def _once_usable(self, fleet: Callable[[], FleetStatus]) -> tuple[int, Sequence[int], str | None]:
        """Wait, with a limit, until the committed version is stored, which follows its commit, or a replica
        gives it. Returns it, those stored up to it, and why it cannot be used."""
        until = time.monotonic() + (STORE_WAIT_S if self._shared else HOLDER_WAIT_S)
        while True:
            status = fleet()
            committed = status.committed_version
            stored = [each for each in self._store.list() if each <= committed]
            if committed == 0:
                return committed, stored, None
            problem = _problem(self._where(committed), QUIET_S)
            is_final = time.monotonic() >= until or (self._shared and committed in stored)
            if problem is None or is_final:
                break
            time.sleep(RETRY_S)
        if problem is not None and self._shared and committed not in stored:
            problem = status.store_problem or problem
        elif problem is not None and not self._shared:
            problem += f"; once a replica gives it, POST /fleet/rollback with version {committed} loads it"
        return committed, stored, problem

    def _on_rank_0(self, work: Callable[[], Value]) -> Value:
        """Its result, or what it raises, on all ranks: they wait for it."""
        done, failure = list[Value](), None
        if self._rank == 0:
            try:
                done.append(work())
            except Exception as error:  # raised below
                failure = error
        done, failure = from_rank_0((done, failure))
        if failure is not None:
            raise failure
        return done[0]

    def _where(self, version: int) -> StoredVersion:
        return self._told(version, str(self._store.path(version)))


def _problem(where: StoredVersion, quiet_s: float) -> str | None:
    try:
        require_version(where, quiet_s).close()
    except (OSError, ValueError) as error:
        return str(error)
    return None


def from_rank_0(value: Value) -> Value:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]
