"""The safetensors file that is written tensor by tensor, read back by the safetensors library."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from deployments.weights.store.safetensors_file import write_safetensors

NUMBERS = torch.arange(7)
TENSORS = {
    "odd.bytes": NUMBERS.to(torch.uint8),
    "half": NUMBERS.to(torch.bfloat16).reshape(7, 1),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "fp8": NUMBERS.to(torch.float8_e4m3fn),
}


def test_every_dtype_is_read_as_it_was(tmp_path: Path) -> None:
    write_safetensors(TENSORS, tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert loaded[name].to(torch.float32).equal(tensor.to(torch.float32))


def test_a_tensor_that_is_strided_or_requires_a_gradient_is_written_too(tmp_path: Path) -> None:
    strided = torch.arange(12.0).reshape(3, 4).t()
    parameter = torch.nn.Parameter(torch.arange(3.0))
    write_safetensors({"strided": strided, "parameter": parameter}, tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors")
    assert torch.equal(loaded["strided"], strided) and torch.equal(loaded["parameter"], parameter)


def test_transformers_recognises_the_file(tmp_path: Path) -> None:
    write_safetensors(TENSORS, tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_dtype_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'q' has dtype torch\.complex128, which safetensors cannot hold"):
        write_safetensors({"q": torch.empty(2, dtype=torch.complex128)}, tmp_path / "x")
    assert not (tmp_path / "x").exists()
