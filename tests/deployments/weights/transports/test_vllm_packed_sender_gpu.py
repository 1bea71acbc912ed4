"""A finding about vLLM 0.32's packed NCCL sender, which `docs/clients/vllm.md` tells trainers to work around.

It packs on streams of its own, which do not wait for the caller's: weights that are still being computed are
sent as they are at that moment. The fleet has no digests of that wire, and cannot see it.
https://github.com/vllm-project/vllm-ascend/pull/12713 describes the same of its copy.
"""

from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

pytestmark = pytest.mark.gpu
CYCLES = 1 << 30  # over half a second


class Recording:
    """Stands for the communicator: keeps what is broadcast, on the stream on which it would be sent."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self.sent.append(tensor.clone())


@pytest.mark.parametrize("synchronizes", [False, True])
def test_it_sends_what_is_not_computed_yet_unless_the_trainer_synchronizes(synchronizes: bool) -> None:
    weight = torch.zeros(1 << 18, device="cuda")
    packed_nccl_broadcast_producer(iter([("w", weight)]), Recording(), 0, _tensor)  # loads its kernels
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    weight.fill_(1.0)  # as an optimizer's step that is queued
    if synchronizes:
        torch.cuda.synchronize()
    group = Recording()
    packed_nccl_broadcast_producer(iter([("w", weight)]), group, 0, _tensor)
    torch.cuda.synchronize()
    (sent,) = group.sent
    assert sent.view(torch.float32).mean().item() == float(synchronizes), "mended in vLLM? then say so"


def _tensor(pair: Any) -> torch.Tensor:
    tensor: torch.Tensor = pair[1]
    return tensor
