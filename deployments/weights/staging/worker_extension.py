"""What the follower can ask of a vLLM worker beyond vLLM's own weight-transfer calls.

vLLM mixes this class into its worker (`worker_extension_cls`); the follower reaches it with
`collective_rpc` and gets one answer a worker.
"""

from typing import Any

from deployments.weights.staging.engine import StagedWeightTransferEngine
from deployments.weights.staging.native import NativeWorkerExtension


class StagingWorkerExtension(NativeWorkerExtension):
    weight_transfer_engine: StagedWeightTransferEngine[Any, Any]
    model_runner: Any
    start_weight_update: Any
    _weight_update_active: bool

    def staging_connected(self) -> dict[str, Any]:
        return self.weight_transfer_engine.connected()

    def staging_report_to(self, page: str) -> bool:
        return self.weight_transfer_engine.report_to(page)

    def staging_begin(self, keep: int | None) -> None:
        """vLLM's `start_weight_update`.

        Args:
            keep: a version; its tensors are kept for the store, on one worker of the replica.
        """
        self.start_weight_update()
        if keep is not None and self.weight_transfer_engine.worker_index == 0:
            self.weight_transfer_engine.keeper.expect(keep)

    def staging_receive(self, payload: Any, share: float, begin: dict[str, Any] | None) -> None:
        """vLLM's `update_weights`, with the share of the device's time that it may take.

        Args:
            begin: the session is begun in the same call, with these arguments of `staging_begin`.
        """
        if begin is not None:
            self.staging_begin(**begin)
        self.weight_transfer_engine.share = share
        self.update_weights(payload)

    def staging_progress(self) -> dict[str, Any]:
        return self.weight_transfer_engine.progress()

    def staging_plans(self) -> dict[str, Any]:
        return self.weight_transfer_engine.staging.plans()

    def staging_verify(self) -> dict[str, Any]:
        return self.weight_transfer_engine.verify()

    def staging_drop(self) -> None:
        self.weight_transfer_engine.drop()
        self._weight_update_active = False  # vLLM has no way to end an update without loading it

    def staging_store(self, version: int, label: str | None, directory: str, keep: int) -> None:
        if self.weight_transfer_engine.worker_index == 0:
            self.weight_transfer_engine.keeper.write(version, label, directory, keep)

    def staging_store_state(self) -> dict[str, Any] | None:
        return self.weight_transfer_engine.keeper.state()

    def staging_forget(self, version: int) -> None:
        self.weight_transfer_engine.keeper.forget(version)

    def load_checkpoint(self, path: str) -> None:
        """Load a checkpoint directory into the live model; the scheduler must be paused."""
        self.model_runner.reload_weights(weights_path=path)
