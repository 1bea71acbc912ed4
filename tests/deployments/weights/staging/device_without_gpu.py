"""`DeviceStaging` on a CPU, with vLLM's real models: what it does and in which order, without its streams.

For a process of its own: torch and the module are changed for good. Triton's kernel for the poison is written
again in torch.
"""

from typing import Any

import torch
from vllm.config import VllmConfig

from deployments.weights.staging import device, nan_poison


class _Queue:
    """A stream and an event, where everything is done at once."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def _launch(self: nan_poison.NanPoison, found: torch.Tensor, *, SET: bool) -> None:
    for index, parameter in enumerate(self._parameters.values()):
        columns = nan_poison.outer_columns(parameter.shadow)
        if SET:
            columns.fill_(float("nan"))
        else:
            found[index] = columns.isnan().any()


def device_staging(config: VllmConfig, live: torch.nn.Module) -> device.DeviceStaging:
    queue: Any = _Queue()
    changed: Any = torch.cuda
    changed.Event = changed.current_stream = lambda *_: queue
    changed.synchronize = lambda *_: None
    replaced: Any = device
    replaced.check_support = replaced.check_memory = replaced.warm_up = lambda *_: None
    nan_poison.NanPoison._launch = _launch  # type: ignore[method-assign]
    return device.DeviceStaging(config, torch.device("cpu"), live)
