"""The stored versions that a trainer may load: its own fleet's, with the bytes that were committed.

Rank 0 reads and compares them; all ranks load the same one, or none does.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from deployments.host.logs import serve_logger
from deployments.weights.store.checkpoint_files import check_files
from deployments.weights.store.versions import Store

Value = TypeVar("Value")
logger = serve_logger()


class StoredWeights:
    """The store as one rank of the trainer sees it. Every rank makes every call."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank

    def newest(self, fleet_id: str) -> int:
        """The newest usable version, 0 if the store is empty.

        Raises:
            ValueError: none can be used.
        """
        versions = from_rank_0(list(self._store.list()))
        problems: list[str] = []
        for version in reversed(versions):
            problem = self.problem(version, fleet_id)
            if problem is None:
                self._warn(version, problems)
                return version
            problems.append(problem)
        if problems:
            raise ValueError(
                f"no version in {self._store.directory} can be used: {'; '.join(problems)}; move them away "
                "to start from the model again"
            )
        return 0

    def problem(self, version: int, fleet_id: str) -> str | None:
        """Why a version cannot be used; None if it can.

        Raises:
            FileNotFoundError: it is not in the store.
        """
        path = self._store.path_of(version)
        return from_rank_0(_problem(path, version, fleet_id) if self._rank == 0 else None)

    def _warn(self, version: int, problems: Sequence[str]) -> None:
        if problems and self._rank == 0:
            logger.warning(
                "the trainer resumes from version %d, and what was trained since is lost: %s",
                version,
                "; ".join(problems),
            )


def _problem(path: Path, version: int, fleet_id: str) -> str | None:
    try:
        check_files(path, version, fleet_id)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def from_rank_0(value: Value) -> Value:
    """Rank 0's value, on every rank. Called on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]
