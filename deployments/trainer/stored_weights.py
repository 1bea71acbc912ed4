"""The stored versions that a trainer may load: its own fleet's, with the committed bytes. Rank 0 reads and
compares them; all ranks load the same one, or none does."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from deployments.protocol.responses import FleetStatus
from deployments.weights.store.checkpoint_files import check_files
from deployments.weights.store.versions import Store

STORE_WAIT_S = 60.0
RETRY_S = 0.5
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    version: int  # 0: the model
    committed: int
    problem: str  # why the committed one cannot be loaded; empty: it can


class StoredWeights:
    """Every rank makes every call."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank

    def find(self, fleet: Callable[[], FleetStatus]) -> Found:
        """The committed version; if it is unusable or not stored in time, the newest usable one before it.
        Raises ValueError if some are stored but none is usable."""
        status, stored = from_rank_0(self._once_stored(fleet))
        committed, problems = status.committed_version, list[str]()
        for version in sorted((each for each in stored if each <= committed), reverse=True):
            problem = self.problem(version, status.fleet_id)
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
            problems.append(status.store_problem or f"version {committed} is not in the store")
        return Found(version=version, committed=committed, problem="; ".join(problems))

    def problem(self, version: int, fleet_id: str) -> str | None:
        """None: the version can be used. Raises FileNotFoundError: not in the store."""
        path = self._store.path_of(version)
        return from_rank_0(_problem(path, version, fleet_id) if self._rank == 0 else None)

    def _once_stored(self, fleet: Callable[[], FleetStatus]) -> tuple[FleetStatus, Sequence[int]]:
        """Wait on rank 0, with a limit, until the committed version is stored, which follows its commit."""
        until = time.monotonic() + STORE_WAIT_S if self._rank == 0 else 0.0
        while True:
            status, stored = fleet(), self._store.list()
            if status.committed_version in (0, *stored) or time.monotonic() >= until:
                return status, stored
            time.sleep(RETRY_S)


def _problem(path: Path, version: int, fleet_id: str) -> str | None:
    try:
        check_files(path, version, fleet_id)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def from_rank_0(value: Value) -> Value:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]
