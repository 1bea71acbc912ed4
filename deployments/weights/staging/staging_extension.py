"""What a replica calls in a vLLM worker, with arguments and results of JSON types.

staging_*   the staged transports
native_*    vLLM's own engines (`staging: none`), which load into the live model, inside a pause
"""

from pathlib import Path
from typing import Any

from vllm.config import set_current_vllm_config

from deployments.protocol.poll import FilePart, WriteVersion
from deployments.weights.staging.drafted_model import PolicyAndDrafter
from deployments.weights.staging.host import load_with_drafter, reload_refusal, replacing_all
from deployments.weights.staging.staged_update import from_wire, to_wire
from deployments.weights.staging.transfer_engine import StagedWeightTransferEngine
from deployments.weights.store.versions import Store
from deployments.weights.wire.cuda_ipc_handles import decode_payload
from deployments.weights.wire.digest import digests
from deployments.weights.wire.digest_definition import version_digest


class StagingWorkerExtension:
    """Called on the engine's thread, between two steps. `wait_s`: limit for work on another thread."""

    weight_transfer_engine: Any
    model_runner: Any
    vllm_config: Any
    start_weight_update: Any
    update_weights: Any
    _weight_update_active: bool

    def staging_receive(self, payload: Any, share: float, begins: bool, retain_version: int | None) -> None:
        """vLLM's `update_weights`, which returns at once. `payload`: of all workers, or one for each.
        `share`: of the device's time, in (0, 1]. `retain_version`: the first worker retains the tensors for
        the store."""
        self._prepare(share, begins, retain_version)
        self.update_weights(payload)

    def staging_read(
        self, part: dict[str, Any], share: float, begins: bool, retain_version: int | None
    ) -> None:
        self._prepare(share, begins, retain_version)
        self.weight_transfer_engine.read_part(from_wire(FilePart, part))

    def _prepare(self, share: float, begins: bool, retain_version: int | None) -> None:
        engine = self.weight_transfer_engine
        if begins:
            self.start_weight_update()
            engine.retained.begin(retain_version if engine.worker_index == 0 else None)
        engine.share = share

    def staging_progress(self, wait_s: float) -> dict[str, Any]:
        return to_wire(self.weight_transfer_engine.progress(wait_s))

    def staging_plans(self) -> tuple[int, list[str]]:
        """How many chunks have a load plan, and why others have none."""
        plans = self.weight_transfer_engine.staging.load_plans
        return len(plans), sorted(set(plans.refused.values()))

    def staging_verify(self) -> dict[str, Any]:
        return to_wire(self.weight_transfer_engine.verify())

    def staging_drop(self) -> None:
        self.weight_transfer_engine.drop()
        self._weight_update_active = False  # vLLM cannot end an update without loading it

    def staging_store(self, body: dict[str, Any], directory: str) -> None:
        engine = self.weight_transfer_engine
        if engine.worker_index == 0:
            wanted = from_wire(WriteVersion, body)
            engine.version_writer.put(engine.retained.committed(wanted), Store(Path(directory)))

    def staging_store_state(self) -> dict[str, Any] | None:
        result = self.weight_transfer_engine.version_writer.result
        return None if result is None else to_wire(result)

    def staging_forget(self, version: int) -> None:
        self.weight_transfer_engine.retained.forget(version)

    def reload_refusal(self) -> str | None:
        return reload_refusal(self.model_runner.get_model())

    def load_checkpoint(self, path: str) -> None:
        engine, model = self.weight_transfer_engine, self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            if isinstance(engine, StagedWeightTransferEngine):
                if engine.staging.load(path):
                    return
                if isinstance(engine.updated, PolicyAndDrafter):
                    return load_with_drafter(self.vllm_config, engine.updated, path)
            with replacing_all(model):
                self.model_runner.reload_weights(weights_path=path)

    def native_check_connected(self) -> None:
        """Raises RuntimeError if vLLM's reload would leave weights out, or its NCCL communicator is disabled:
        its broadcasts would do nothing and report success."""
        if (refusal := self.reload_refusal()) is not None:
            raise RuntimeError(f"staging 'none' is not possible: {refusal}")
        if self.model_runner.get_draft_model() is not None:
            raise RuntimeError(
                "staging 'none' is not possible: vLLM's update would not reach the drafter of speculative "
                "decoding; use 'host' or 'device'"
            )
        group = getattr(self.weight_transfer_engine, "model_update_group", None)
        if group is not None and (group.disabled or not group.available):
            raise RuntimeError(
                "backend 'nccl' does not work here: vLLM has disabled its NCCL communicator (an NCCL older "
                "than 2.29.7? VLLM_NCCL_SO_PATH names the library to use)"
            )

    def native_update(self, payload: dict[str, Any] | list[dict[str, Any]]) -> None:
        if isinstance(payload, list):
            self.update_weights([decode_payload(part) for part in payload])
        else:
            self.update_weights(decode_payload(payload))

    def native_digest(self) -> str:
        parameters = self.model_runner.get_model().named_parameters()
        tensors = {name: parameter.data.contiguous() for name, parameter in parameters if parameter.numel()}
        return version_digest(list(tensors), digests(list(tensors.values())))
