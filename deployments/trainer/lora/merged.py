"""An adapter whose sum with its base is published: which weights are its base, and where it goes on.

The base is what the trainer was started from: the model, or a stored version. After a restart

    a checkpoint of the stored version's step   the same base and adapter: exactly where it was
    none that can be used                       the stored version is the base, and the adapter begins anew:
                                                the policy is what the fleet serves, moments start at zero
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deployments.trainer.checkpoints import Checkpoints
from deployments.trainer.lora.resume import settings
from deployments.trainer.stored_weights import StoredWeights, of_rank_0
from deployments.weights.store.versions import Store
from trainers.settings import LoraConfig


class MergedAdapter:
    """The base of an adapter, on one rank of a trainer.

    Attributes:
        base_version: the version that is the base; 0: the model.
    """

    def __init__(self, config: LoraConfig, store: Store, stored: StoredWeights) -> None:
        self.config = config
        self._store, self._stored = store, stored
        self.base_version = 0

    def find_base(self, checkpoints: Checkpoints, version: int, fleet_id: str | None, model: Path) -> Path:
        """Decide on the base of a trainer that starts, and say where it is. Called on every rank.

        Args:
            version: the newest in the store; 0: there is none.
            model: the directory of version 0.
        """
        saved = of_rank_0(None if version == 0 else self._saved_base(checkpoints, version, fleet_id))
        self.base_version = version if saved is None or not self._is_usable(saved) else saved
        return self._store.path_of(self.base_version) if self.base_version else model

    def about(self) -> Mapping[str, Any]:
        """What a checkpoint says of it, so that it is not continued as another one."""
        return settings(self.config, self.base_version)

    def _is_usable(self, version: int) -> bool:
        if version == 0:
            return True
        return version in of_rank_0(list(self._store.list())) and self._stored.problem(version) is None

    def _saved_base(self, checkpoints: Checkpoints, version: int, fleet_id: str | None) -> int | None:
        """The base of a checkpoint of the version's weights."""
        manifest = self._store.manifest_of(version)
        for _, about in checkpoints.complete(fleet_id):
            saved = about.adapter
            if manifest.trainer_step is None or not about.is_of(manifest.trainer_step, manifest.digest):
                continue
            if saved is not None and isinstance(saved.get("base_version"), int):
                return int(saved["base_version"])
        return None
