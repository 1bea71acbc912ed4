"""vLLM's own transfer engines behind the round protocol (`staging: none`): what a worker does for them.

They load into the live model, so all of this runs with the scheduler paused. vLLM mixes the class into
its worker together with `StagingWorkerExtension`.
"""

from typing import Any

from deployments.weights.wire.cuda_ipc_handles import decode_payload
from deployments.weights.wire.digest import digests
from deployments.weights.wire.digest_definition import version_digest


class NativeWorkerExtension:
    weight_transfer_engine: Any
    model_runner: Any
    update_weights: Any

    def native_check_connected(self) -> None:
        """Raises RuntimeError if vLLM has disabled its NCCL communicator, which then reports success for
        broadcasts that never happened."""
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
        """The digest of the live parameters: equal on replicas that loaded the same weights."""
        parameters = self.model_runner.get_model().named_parameters()
        tensors = {name: parameter.data.contiguous() for name, parameter in parameters if parameter.numel()}
        return version_digest(list(tensors), digests(list(tensors.values())))
