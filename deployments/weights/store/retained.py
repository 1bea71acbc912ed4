"""The tensors of a round as they arrived, retained in host memory until the store has them.

Only for a publisher that writes no checkpoint itself. One worker of a replica retains them (every worker
receives all). At most one version is retained beside the one that is being written; what arrives counts as
retained only after its commit.

On a GPU this costs one copy to the host per tensor while staging; on a CPU it is a reference to memory that
the transfer allocated anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from deployments.weights.store.version_writer import CommittedVersion


@dataclass(slots=True, kw_only=True)
class RetainedVersion:
    """The tensors of one version and the digests that were computed on arrival, by checkpoint name."""

    version: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # on the CPU
    digests: dict[str, int] = field(default_factory=dict)  # unsigned 64-bit


class RetainedVersions:
    """The version that is arriving and the newest committed one.

    Called on the engine's thread, except `add` and `set_digests`, which run on the staging thread.
    """

    def __init__(self) -> None:
        self._arriving: RetainedVersion | None = None
        self._committed: RetainedVersion | None = None

    def begin(self) -> None:
        """Discard what is arriving: its update was dropped, or another one begins."""
        self._arriving = None

    def expect(self, version: int) -> None:
        """Retain what arrives from now on, as this version."""
        self._arriving = RetainedVersion(version=version)

    @property
    def expecting(self) -> bool:
        """Whether what arrives is retained."""
        return self._arriving is not None

    def add(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Retain tensors that arrived, by checkpoint name; copied to the host from a GPU."""
        arriving = self._arriving
        if arriving is not None:
            arriving.tensors.update((name, tensor.cpu()) for name, tensor in tensors)

    def set_digests(self, digests: dict[str, int]) -> None:
        """The digests (unsigned 64-bit) of everything that arrived, by checkpoint name."""
        arriving = self._arriving
        if arriving is not None:
            arriving.digests = digests

    def commit(self) -> None:
        """Make what arrived the retained version. An older one is freed, also when this one is not retained:
        its publisher writes it then."""
        self._committed, self._arriving = self._arriving, None

    def forget(self, version: int) -> None:
        """Free this version and older ones."""
        if self._committed is not None and self._committed.version <= version:
            self._committed = None

    def committed(
        self, version: int, label: str | None, fleet_id: str | None = None, digest: str | None = None
    ) -> CommittedVersion:
        """The retained version, for the store.

        Raises:
            ValueError: this version is not retained here.
        """
        retained = self._committed
        if retained is None or retained.version != version:
            actual = None if retained is None else retained.version
            raise ValueError(f"version {version} must be retained to be stored, the retained one is {actual}")
        return CommittedVersion(
            version=version,
            label=label,
            fleet_id=fleet_id,
            digest=digest,
            tensors=retained.tensors,
            expected_digests=retained.digests,
        )
