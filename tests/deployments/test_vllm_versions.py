import runpy

import pytest
import torch
import vllm
from vllm.distributed.weight_transfer import ModuleSource

from deployments.vllm_versions import specs_of, tensors_of


def test_other_versions_of_vllm_are_refused_with_those_that_are_supported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.1.dev7")
    with pytest.raises(ImportError, match=r"^expected vLLM 0\.32 or 0\.33, got 0\.34\.1\.dev7$"):
        runpy.run_module("deployments.vllm_versions")


def test_a_source_of_vllms_own_is_read() -> None:
    module = torch.nn.Linear(2, 3)
    source = ModuleSource(module)
    assert [(spec.name, spec.shape) for spec in specs_of(source)] == [("weight", (3, 2)), ("bias", (3,))]
    assert [tensor is getattr(module, name) for name, tensor in tensors_of(source)] == [True, True]
