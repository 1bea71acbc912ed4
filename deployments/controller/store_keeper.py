"""The store as the controller keeps it: only this fleet's versions, and no more of them than are needed.

Whose a version is, and which may go, is the ledger's decision (`deployments.ledger.promises`).
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from deployments.controller.removal import Removal
from deployments.ledger.promises import Promises
from deployments.protocol.errors import InvalidRequest, JournalError
from deployments.weights.store.versions import Store

Owners = Mapping[int, str | None]


class StoreKeeper:
    """Checks, reads and empties the store.

    Args:
        keep: how many versions stay; beside them those that a joiner was told to load.
    """

    def __init__(self, store: Store, promises: Promises, keep: int) -> None:
        self._store = store
        self._promises = promises
        self._known: dict[int, str | None] = {}  # a version never changes: its manifest is read once
        # A version that is being read stays until a later pass.
        self.removal = Removal(
            "versions", self._owners, lambda owned: promises.removable(owned, keep), store.remove
        )

    def check_owner(self, state_dir: Path) -> None:
        """To be called when the controller starts.

        Raises:
            JournalError: the store has versions of another fleet.
        """
        foreign = self._promises.foreign(self._owners())
        if not foreign:
            return
        owners = " and ".join(sorted({_name(owner) for owner in foreign.values()}))
        raise JournalError(
            f"store {self._store.directory} has versions {sorted(foreign)} of {owners}, and the journal in "
            f"{state_dir} is of {_name(self._promises.fleet_id)}. To start anew, move them away or set "
            "'store.path' to another directory; to begin with the weights of one, move it away and set "
            "'model' to it; to go on as the other fleet, bring its journal back"
        )

    def source(self, version: int) -> str:
        """The directory of a stored version of this fleet. Reads the disk.

        Raises:
            InvalidRequest: it is not in the store, is another fleet's, or its manifest cannot be read.
        """
        stored = list(self._store.list())
        if version in stored:
            self._check_manifest(version)
        own = [each for each in stored if each not in self._promises.foreign(self._owners())]
        if version not in own:
            others = f"; {sorted({*stored} - {*own})} are another fleet's" if own != stored else ""
            raise InvalidRequest(
                f"version: expected one in the store {own}, got {version}{others}",
                {"expected": own, "actual": version},
            )
        return str(self._store.path_of(version))

    def _check_manifest(self, version: int) -> None:
        """Whose a version is and what was written, the manifest alone says. Reads it again: it may have been
        damaged since."""
        try:
            stated = self._store.manifest_of(version).version
            problem = None if stated == version else f"its manifest is of version {stated}"
        except (OSError, ValueError) as error:
            problem = f"its manifest cannot be read: {error}"
        if problem is not None:
            raise InvalidRequest(
                f"version {version} cannot be rolled back to: {problem}; roll back to another one"
            )

    def _owners(self) -> Owners:
        """The fleet id of each stored version, None where the manifest names none.

        Versions whose manifest cannot be read are left out: they are nobody's, and stay.
        """
        stored = self._store.list()
        for version in stored:
            if version not in self._known:
                with suppress(OSError, ValueError):
                    self._known[version] = self._store.manifest_of(version).fleet_id
        self._known = {version: self._known[version] for version in stored if version in self._known}
        return dict(self._known)


def _name(owner: str | None) -> str:
    return "a fleet without an id" if owner is None else f"fleet {owner}"
