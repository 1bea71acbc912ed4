"""The stored versions that a trainer may load: its own fleet's, with the committed bytes. Rank 0 reads and
compares them, and takes what its host lacks from a replica, if hosts share no store; all ranks load the same
one, or none does."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from deployments.protocol.poll import JoinAnswer
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
        self, store: Store, rank: int, told: Callable[[int, str], JoinAnswer], *, shared: bool
    ) -> None:
        self._store = store
        self._rank = rank
        self._told = told
        self._shared = shared

    def find(self, fleet: Callable[[], FleetStatus]) -> Found:
        """The committed version; if it is unusable or not stored in time, the newest usable one before it.
        Raises ValueError if some are stored but none is usable."""
        status, stored, absent = from_rank_0(self._once_stored(fleet))
        committed, problems = status.committed_version, list[str]()
        for version in sorted((each for each in stored if each <= committed), reverse=True):
            problem = self.problem(version)
            if problem is None:
                break
            problems.append(problem)
        else:
            if problems:
                raise ValueError(
                    f"no version in {self._store.directory} can be used: {'; '.join(problems)}; move them "
                    "away to start from the model again"
                )
            version = 0
        if version != committed and not problems:
            why = status.store_problem or f"version {committed} is not in the store"
            if not self._shared:
                why = absent or f"version {committed} is not in {self._store.directory}, and no replica runs"
                why += f"; once one gives it, POST /fleet/rollback with version {committed} loads it"
            problems.append(why)
        return Found(version=version, committed=committed, problem="; ".join(problems))

    def problem(self, version: int) -> str | None:
        """None: the version can be used. An absent or damaged one is fetched if a replica has it now."""
        return from_rank_0(_problem(self._where(version), quiet_s=0.0) if self._rank == 0 else None)

    def _once_stored(self, fleet: Callable[[], FleetStatus]) -> tuple[FleetStatus, Sequence[int], str | None]:
        """Wait on rank 0, with a limit, until the committed version is stored, which follows its commit, or a
        replica gives it. The third: why none did."""
        until = time.monotonic() + (STORE_WAIT_S if self._shared else HOLDER_WAIT_S)
        while True:
            status, stored = fleet(), self._store.list()
            version = status.committed_version
            if self._rank != 0 or version in (0, *stored):
                return status, stored, None
            where = self._where(version)
            if where.holders:
                problem = _problem(where, QUIET_S)
                return status, self._store.list(), problem
            if time.monotonic() >= until:
                return status, stored, None
            time.sleep(RETRY_S)

    def _where(self, version: int) -> JoinAnswer:
        return self._told(version, str(self._store.path(version)))


def _problem(where: JoinAnswer, quiet_s: float) -> str | None:
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
