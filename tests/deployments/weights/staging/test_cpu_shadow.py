"""A version that is prepared beside the model that serves: complete, exact, and gone when it is dropped."""

from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from deployments.weights.staging.cpu_shadow import (
    BlankParameter,
    CpuShadowStaging,
    blank_parameters,
    check_cpu_memory,
)
from deployments.weights.wire.chunk_layout import plan_chunks


class Half(torch.nn.Module):
    """A part of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 2), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.zeros(4), requires_grad=False)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Half(), Half()

    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            default_weight_loader(parameters[name], tensor)

    def values(self) -> dict[str, float]:
        return {name: float(parameter.reshape(-1)[0]) for name, parameter in self.named_parameters()}


@pytest.fixture
def live() -> Model:
    return Model()


@pytest.fixture
def staging(live: Model) -> CpuShadowStaging:
    return CpuShadowStaging(VllmConfig(), live, Model())


def stage(staging: CpuShadowStaging, value: float, names: list[str], *, complete: bool = True) -> list[str]:
    parameters = dict(Model().named_parameters())
    tensors = [(name, torch.full_like(parameters[name].data, value)) for name in names]
    [chunk] = plan_chunks([(name, tensor.dtype, tensor.shape) for name, tensor in tensors], 1 << 20)
    staging.begin()
    with torch.no_grad():
        staging.add(chunk, tensors)
        return staging.finalize(complete=complete, check_open=lambda: None)


ALL = ["one.weight", "one.bias", "two.weight", "two.bias"]


def test_live_weights_change_only_at_the_swap(live: Model, staging: CpuShadowStaging) -> None:
    assert stage(staging, 2.0, ALL) == []
    assert live.values() == dict.fromkeys(ALL, 0.0)
    staging.swap()
    assert live.values() == dict.fromkeys(ALL, 2.0)


def test_a_dropped_version_leaves_nothing_to_the_next_one(live: Model, staging: CpuShadowStaging) -> None:
    assert stage(staging, 2.0, ALL) == []
    staging.drop()
    assert not any(parameter.numel() for parameter in staging._shadow.parameters())
    assert stage(staging, 3.0, ALL[:2]) == []
    staging.swap()
    assert live.values() == {"one.weight": 3.0, "one.bias": 3.0, "two.weight": 0.0, "two.bias": 0.0}


def test_a_missing_parameter_keeps_its_live_values(live: Model, staging: CpuShadowStaging) -> None:
    assert stage(staging, 2.0, ALL) == []
    staging.swap()
    staging.retire()
    assert stage(staging, 3.0, ["one.weight"]) == []
    staging.swap()
    assert live.values() == {"one.weight": 3.0, "one.bias": 2.0, "two.weight": 2.0, "two.bias": 2.0}


def test_missing_parameters_are_named_if_the_version_may_be_incomplete(
    live: Model, staging: CpuShadowStaging
) -> None:
    assert stage(staging, 2.0, ALL[:3], complete=False) == ["two.bias"]
    staging.drop()
    staging.begin()
    assert staging.finalize(complete=False, check_open=lambda: None) == ALL
    assert live.values() == dict.fromkeys(ALL, 0.0)


def test_a_second_copy_that_does_not_fit_is_refused_with_the_sizes() -> None:
    check_cpu_memory(VllmConfig(), 1 << 20)
    with pytest.raises(
        ValueError, match=r"^a second copy of the weights needs 1048576\.0 GiB, and the KV cache"
    ):
        check_cpu_memory(VllmConfig(), 1 << 50)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 3)
        self.second = torch.nn.Linear(4, 3, bias=False)
        self.second.weight = self.first.weight


@pytest.fixture
def blanks() -> list[BlankParameter]:
    """A weight that is tied, and a bias."""
    blanks = blank_parameters(Tied())
    for blank in blanks:
        blank.allocate()
    return blanks


@torch.no_grad()
def test_unloaded_parts_of_a_parameter_are_detected(blanks: list[BlankParameter]) -> None:
    [weight, bias] = blanks
    assert weight.names == ["first.weight", "second.weight"]
    assert [blank.lacks() for blank in blanks] == [(True, True)] * 2
    weight.parameter[:2] = 1.0
    bias.parameter.fill_(0.0)
    assert [blank.lacks() for blank in blanks] == [(True, False), (False, False)]
    weight.parameter[2] = 1.0
    assert weight.lacks() == (False, False)


@torch.no_grad()
@pytest.mark.parametrize("rows", [True, False])
def test_padding_is_zero(rows: bool, blanks: list[BlankParameter]) -> None:
    weight = blanks[0]
    loaded = torch.ones(3, 4)
    (loaded[2:] if rows else loaded[:, 3:]).zero_()
    (weight.parameter[:2] if rows else weight.parameter[:, :3]).fill_(1.0)
    weight.pad()
    assert torch.equal(weight.parameter, loaded)


@torch.no_grad()
def test_release_frees_processed_parameters() -> None:
    model = Tied()
    [weight, bias] = blank_parameters(model)
    assert model.first.weight.numel() == 0
    weight.allocate()
    bias.allocate()
    model.first.weight = torch.nn.Parameter(torch.zeros(5), requires_grad=False)
    weight.release()
    bias.release()
    assert model.first.weight is model.second.weight is weight.parameter
    assert sum(parameter.numel() for parameter in model.parameters()) == 0
    weight.allocate()
    assert model.second.weight.shape == (3, 4)
