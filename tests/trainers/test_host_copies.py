from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save

from trainers import lora as module
from trainers.lora import copied_together, host_copies, safetensors_file


def tensors(device: str) -> list[torch.Tensor]:
    made = [torch.randn(3, 4), torch.randn(()), torch.arange(6), torch.randn(5, 2).T, torch.randn(2, 0)]
    return [each.to(device) for each in made]


def test_what_is_in_host_memory_is_not_copied() -> None:
    given = tensors("cpu")
    for before, after in zip(given, host_copies(given), strict=True):
        assert torch.equal(before, after) and after.is_contiguous()
    assert host_copies(given)[0].data_ptr() == given[0].data_ptr()


def test_tensors_that_are_copied_together_can_be_written(tmp_path: Path) -> None:
    given = [torch.randn(3, 4), torch.randn(()), torch.randn(2, 2)]
    made = copied_together(given)
    for before, after in zip(given, made, strict=True):
        assert torch.equal(before, after) and after.is_contiguous()
    file = tmp_path / "file"
    file.write_bytes(save({str(index): each for index, each in enumerate(made)}))
    read = load_file(file)
    assert all(torch.equal(read[str(index)], each) for index, each in enumerate(made))


@pytest.mark.gpu
@pytest.mark.parametrize("at_once", [1, 40, 1 << 20])
def test_from_a_gpu(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(module, "COPIED_AT_ONCE", at_once)
    given = tensors("cuda")
    for before, after in zip(given, host_copies(given), strict=True):
        assert after.device.type == "cpu" and after.is_contiguous()
        assert torch.equal(before.cpu(), after)


@pytest.mark.parametrize("at_once", [1, 40, 1 << 20])
def test_batches_hold_every_tensor_once(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(module, "COPIED_AT_ONCE", at_once)
    given = tensors("cpu")
    batches = list(module._batches(given, range(len(given))))
    assert [index for batch in batches for index in batch] == list(range(len(given)))
    assert all(len(batch) == 1 or sum(given[i].nbytes for i in batch) <= at_once for batch in batches)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safetensors_reads_the_file_that_is_made_here(dtype: torch.dtype, device: str) -> None:
    floats = [each for each in tensors(device) if each.is_floating_point()]
    given = {f"{'x' * index}.\u00fc": each for index, each in enumerate(floats)}
    file = safetensors_file(given, dtype=dtype, metadata={"format": "pt", "a": '\u00fc"\n'})
    assert file.device.type == device
    read = load(file.cpu().numpy().tobytes())
    assert read.keys() == given.keys()
    for name, tensor in given.items():
        assert torch.equal(read[name], tensor.to(dtype).cpu()), name
    assert int.from_bytes(file[:8].tolist(), "little") % 8 == 0, "the tensors are aligned"
