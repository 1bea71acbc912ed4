"""A version that is prepared beside the model that serves: complete, exact, and gone when it is dropped."""

from typing import Any

import pytest
import torch
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from deployments.weights.staging.cpu_shadow import (
    CpuShadowStaging,
    check_cpu_memory,
    cpu_shadow_staging,
)
from deployments.weights.staging.host import HostStaging
from deployments.weights.staging.transfer_engine import make_staging
from deployments.weights.wire.chunk_layout import plan_chunks
from tests.deployments.weights.staging.family_results import KERNELS, ONCE, Results, family_results


@pytest.fixture(scope="module", params=KERNELS)
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Results:
    return family_results(tmp_path_factory.mktemp("shadow"), "shadow", request.param)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "family", ["experts", "padded-experts", "dense", "mla", "gpt-oss", "tied", "tied-twice"]
)
def test_after_each_swap_a_model_is_what_a_fresh_load_of_the_version_is(family: str, found: Results) -> None:
    assert found[family].get("behind") == [[], []], found[family]


@ONCE
@pytest.mark.timeout(600)
def test_an_output_embedding_that_the_engine_has_tied_may_not_differ_later(found: Results) -> None:
    assert "they differ" in found["tied-twice"]["refused"]
    assert found["tied-twice"]["behind after"] == [], "what serves is as it was"


@ONCE
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["dense-lora", "experts-lora"])
def test_modules_that_lora_wraps_are_refused(family: str, found: Results) -> None:
    message = "staging 'device' is not possible on this CPU: LoRA wraps the live modules; 'host' is"
    assert found[family]["refused"] == message


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


def stage(
    staging: CpuShadowStaging, value: float, names: list[str], *, complete: bool = True, rows: int = 4
) -> list[str]:
    parameters = dict(Model().named_parameters())
    tensors = [(name, torch.full_like(parameters[name].data, value)) for name in names]
    [chunk] = plan_chunks([(name, tensor.dtype, tensor.shape) for name, tensor in tensors], 1 << 20)
    staging.begin()
    with torch.no_grad():
        staging.add(chunk, tensors)
        return staging.finalize(complete=complete, rest=lambda: None)


ALL = ["one.weight", "one.bias", "two.weight", "two.bias"]


def test_nothing_changes_before_the_swap_and_everything_with_it(
    live: Model, staging: CpuShadowStaging
) -> None:
    assert stage(staging, 2.0, ALL) == []
    assert live.values() == dict.fromkeys(ALL, 0.0)
    staging.swap()
    assert live.values() == dict.fromkeys(ALL, 2.0)


def test_a_version_that_was_dropped_leaves_nothing_to_the_next_one(
    live: Model, staging: CpuShadowStaging
) -> None:
    assert stage(staging, 2.0, ALL) == []
    staging.drop()
    assert stage(staging, 3.0, ALL[:2]) == []
    staging.swap()
    assert live.values() == {"one.weight": 3.0, "one.bias": 3.0, "two.weight": 0.0, "two.bias": 0.0}


def test_a_parameter_that_does_not_arrive_keeps_its_numbers_beside_one_that_does(
    live: Model, staging: CpuShadowStaging
) -> None:
    assert stage(staging, 2.0, ALL) == []
    staging.swap()
    staging.retire()
    assert stage(staging, 3.0, ["one.weight"]) == []
    staging.swap()
    assert live.values() == {"one.weight": 3.0, "one.bias": 2.0, "two.weight": 2.0, "two.bias": 2.0}


def test_what_does_not_arrive_is_named_where_nobody_knows_that_it_need_not(
    live: Model, staging: CpuShadowStaging
) -> None:
    assert stage(staging, 2.0, ALL[:3], complete=False) == ["two.bias"]
    staging.drop()
    staging.begin()
    assert staging.finalize(complete=False, rest=lambda: None) == ALL
    assert live.values() == dict.fromkeys(ALL, 0.0)


def test_between_rounds_the_second_instance_has_no_memory(live: Model) -> None:
    staging = CpuShadowStaging(VllmConfig(), live, shadow := Model())

    def size() -> int:
        return sum(parameter.numel() for parameter in shadow.parameters())

    assert size() == 0
    stage(staging, 2.0, ALL)
    assert size() == 24
    staging.swap()
    staging.retire()
    assert size() == 0


def test_a_second_copy_that_does_not_fit_is_refused_with_the_sizes() -> None:
    check_cpu_memory(VllmConfig(), 1 << 20)
    with pytest.raises(
        ValueError, match=r"^a second copy of the weights needs 1048576\.0 GiB, and the KV cache"
    ):
        check_cpu_memory(VllmConfig(), 1 << 50)


def configured(staging: str) -> VllmConfig:
    """Of an engine whose model cannot be constructed a second time: the configuration does not name one."""
    config = VllmConfig(additional_config={"staging": staging})
    config.compilation_config.mode = CompilationMode.NONE
    return config


def test_a_model_that_cannot_be_constructed_twice_is_refused(live: Model) -> None:
    with pytest.raises(
        ValueError, match=r"^staging 'device' is not possible on this CPU: .*; 'host' is$"
    ) as e:
        make_staging(configured("device"), torch.device("cpu"), live)
    assert "compiled" not in str(e.value)


def test_an_engine_whose_staging_is_not_configured_takes_the_other_one_then(live: Model) -> None:
    assert isinstance(make_staging(configured("automatic"), torch.device("cpu"), live), HostStaging)


def test_an_engine_that_compiles_is_refused(live: Model) -> None:
    config = VllmConfig()
    config.compilation_config.mode = CompilationMode.VLLM_COMPILE
    with pytest.raises(ValueError, match="it is compiled"):
        cpu_shadow_staging(config, live)
