"""The file of an adapter, beside what safetensors reads of it."""

import pytest
import torch
from safetensors.torch import load

from trainers.lora import safetensors_file


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safetensors_reads_the_file_that_is_made_here(dtype: torch.dtype, device: str) -> None:
    made = [torch.randn(3, 4), torch.randn(()), torch.randn(5, 2).T, torch.randn(2, 0)]
    floats = [each.to(device) for each in made]
    given = {f"{'x' * index}.\u00fc": each for index, each in enumerate(floats)}
    file = safetensors_file(given, dtype=dtype, metadata={"format": "pt", "a": '\u00fc"\n'})
    assert file.device.type == device
    read = load(file.cpu().numpy().tobytes())
    assert read.keys() == given.keys()
    for name, tensor in given.items():
        assert torch.equal(read[name], tensor.to(dtype).cpu()), name
    assert int.from_bytes(file[:8].tolist(), "little") % 8 == 0, "the tensors are aligned"
