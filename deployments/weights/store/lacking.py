"""The tensors that a version's publisher lacks: from where a stored version, which is complete, gets them.

A round that lacks them leaves them as they were. So they are those of the version before, which another
publisher may have changed since the fleet began:

    version     1        2        3        4        5
    publisher   part     all      part     part     part
    kept since  0        -        2        2        2       the first version that has the same ones

Any version from there on has them; version 0 is the checkpoint of the start. If none of these is in the
store, the version cannot be stored: with others its number would name other weights than the fleet serves.
"""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from deployments.weights.store.manifest import VersionManifest
from deployments.weights.store.safetensors_file import read_tensors
from deployments.weights.store.versions import Store
from deployments.weights.wire.checkpoint_schema import join_reasons
from deployments.weights.wire.digest import digest

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lacking:
    """What the publisher of a version lacks."""

    names: Collection[str] = ()
    since: int = 0  # the first version that has the same ones; 0: the checkpoint of the start
    base: Path = Path()  # the checkpoint of the start

    def read(self, version: int, fleet_id: str | None, store: Store) -> Tensors:
        """These tensors as they are in `version`, which is not stored yet; memory-mapped.

        Raises:
            ValueError: neither the store nor the checkpoint of the start has them, or they are damaged.
            OSError: a file cannot be read.
        """
        if not self.names:
            return {}
        if self.since == 0 and self.base.is_dir():
            return read_tensors(self.base, self.names)
        found = self._in_store(range(self.since, version), fleet_id, store)
        if found is None:
            raise ValueError(
                f"its publisher lacks {len(self.names)} of its tensors, first {min(self.names)!r}; they are "
                f"those of {_named(self.since, version - 1)} in {store.directory}: publish a directory that "
                "has all tensors, such as a stored version's"
            )
        return found

    def newest(self, fleet_id: str | None, store: Store) -> Tensors:
        """These tensors as they are in the newest stored version, in the checkpoint of the start if there is
        none; memory-mapped. Another publisher may have changed them after `since`.

        Raises:
            ValueError: only older versions are stored, or the tensors are damaged.
            OSError: a file cannot be read.
        """
        if not self.names:
            return {}
        versions = store.list()
        found = self._in_store(range(self.since, versions[-1] + 1), fleet_id, store) if versions else None
        if found is None and self.since == 0:
            return read_tensors(self.base, self.names)
        if found is None:
            raise ValueError(
                f"the trainer lacks {len(self.names)} of its tensors, first {min(self.names)!r}; they are "
                f"those of version {self.since}, and neither that nor a later one is in {store.directory}"
            )
        return found

    def _in_store(self, versions: range, fleet_id: str | None, store: Store) -> Tensors | None:
        """From the newest of these versions that the store has."""
        for stored in reversed(store.list()):
            if stored in versions:
                with suppress(FileNotFoundError), store.reading(stored) as directory:  # else just removed
                    manifest = store.manifest_of(stored)
                    if manifest.fleet_id in (None, fleet_id):
                        return _checked(read_tensors(directory, self.names), manifest)
        return None


NOTHING = Lacking()


def _checked(found: Tensors, manifest: VersionManifest) -> Tensors:
    """They would get new digests, and nobody could tell any more that they are damaged."""
    stated = {name: manifest.tensors[name].digest for name in found if name in manifest.tensors}
    problems = [
        f"{name!r} was written with digest {stated.get(name)}"
        for name, tensor in found.items()
        if stated.get(name) not in (None, f"{digest(tensor):016x}")
    ]
    if problems:
        raise ValueError(
            f"version {manifest.version}, from which it gets what its publisher lacks, is damaged: "
            + join_reasons(problems)
        )
    return found


def _named(first: int, last: int) -> str:
    if first == last:
        return f"version {last}, which is not"
    return f"versions {first} to {last}, none of which is"
