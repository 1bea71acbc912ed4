"""What a model derives from its weights is swapped with them, or refused by its name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deployments.weights.staging.model_state.derived import Derived, Moving, classify, keep_constants
from deployments.weights.staging.model_state.observation import changed_tensors, observe
from deployments.weights.staging.model_state.pairs import pair
from tests.deployments.weights.staging.model_state.hiding_models import (
    HIDING,
    Model,
    as_a_float,
    as_attribute,
    wrapped,
)


def prepared(hide: Callable[[Any, torch.Tensor], None]) -> tuple[Model, Model, Moving]:
    """The live model with seed 1, its shadow, and what follows."""
    live = Model(hide, 1)
    before = observe(live)
    shadow = Model(hide, 2)
    first = observe(shadow)
    shadow.load(3)
    return live, shadow, classify(before, first, observe(shadow))


@pytest.mark.parametrize("hide", HIDING, ids=lambda hide: hide.__name__)
def test_a_swap_brings_along_what_is_hidden(hide: Callable[[Any, torch.Tensor], None]) -> None:
    live, shadow, moving = prepared(hide)
    pairs = pair(live, shadow)
    derived = Derived(live, shadow, moving, baked=False)
    for seed in (4, 5):
        shadow.load(seed)
        derived.collect()
        pairs.copy_to_live()
        derived.swap()
        found, expected = observe(live), observe(Model(hide, seed))
        assert not changed_tensors(found, expected)
        assert found.numbers == expected.numbers
        assert len(found.tensors) == len(expected.tensors)


def test_tensors_stay_where_they_are_because_captured_graphs_refer_to_them() -> None:
    live, shadow, moving = prepared(wrapped)
    layer: Any = live.layers[0]
    address = layer.w13.storage.data.data_ptr()
    derived = Derived(live, shadow, moving, baked=True)
    shadow.load(4)
    derived.collect()
    derived.swap()
    assert layer.w13.storage.data.data_ptr() == address
    assert torch.equal(layer.w13.storage.data, Model(wrapped, 4).layers[0].weight * 2)  # type: ignore[operator]


def test_what_does_not_come_from_weights_is_left_alone() -> None:
    def hide(layer: Any, weight: torch.Tensor) -> None:
        layer.__dict__.setdefault("cos_sin", torch.arange(8.0))
        layer.__dict__.setdefault("scratch", torch.full((3,), torch.nan))
        layer.view = weight[1:3]
        layer.eps = 1e-6

    live, _, moving = prepared(hide)
    assert moving == Moving(tensors=(), numbers=())
    live.layers[0].kv_cache = torch.zeros(5)  # allocated later: nobody asks about it


def test_a_constant_survives_the_loss_of_the_memory_that_it_was_loaded_into() -> None:
    def hide(layer: Any, weight: torch.Tensor) -> None:
        if not hasattr(layer, "constant"):  # made once: what a load makes anew counts as derived
            layer.constant = torch.arange(6.0)
        layer.derived = weight * 2

    live, _, moving = prepared(hide)
    layer: Any = live.layers[0]
    lost, derived_at = layer.constant.data, layer.derived.data_ptr()
    keep_constants(observe(live), moving, torch.device("cpu"))
    lost.fill_(torch.nan)  # as a sleep at level 2 does
    assert torch.equal(layer.constant, torch.arange(6.0))
    assert layer.derived.data_ptr() == derived_at, "what a round replaces may be lost, and may be large"


def refusal(hide: Callable[[Any, torch.Tensor], None]) -> str:
    with pytest.raises(
        ValueError, match=r"^staging 'device' is not possible: .*; use 'host' or 'none'$"
    ) as error:
        prepared(hide)
    return str(error.value)


def test_what_only_the_initial_load_derives_is_refused_by_name() -> None:
    def hide(layer: Any, weight: torch.Tensor) -> None:
        layer.__dict__.setdefault("fused", weight * 2)
        layer.__dict__.setdefault("scale", float(weight.max()))

    message = refusal(hide)
    assert "'layers.0.fused' comes from the weights, and loading does not renew it" in message
    assert "'layers.0.scale' comes from the weights" in message


def test_a_parameter_that_loading_does_not_renew_is_refused_by_name() -> None:
    def hide(layer: Any, weight: torch.Tensor) -> None:
        if "fused" not in layer._parameters:
            layer.fused = torch.nn.Parameter(weight * 2, requires_grad=False)

    assert "'layers.0.fused' comes from the weights, and loading does not renew it" in refusal(hide)


def test_what_a_second_instance_does_not_have_is_refused_by_name() -> None:
    instances: list[Any] = []

    def hide(layer: Any, weight: torch.Tensor) -> None:
        instances.append(layer)
        if len(instances) == 1:
            layer.extra = weight * 2

    assert "'layers.0.extra' is a tensor that it does not have" in refusal(hide)


def test_another_layout_is_refused_with_both() -> None:
    sizes = iter(range(1, 100))

    def hide(layer: Any, weight: torch.Tensor) -> None:
        layer.packed = weight.flatten()[: next(sizes)].clone()

    assert "'layers.0.packed' is torch.float32 [1] (1,) on cpu and there torch.float32 [5]" in refusal(hide)


def test_addresses_are_refused_because_a_copy_would_lead_to_the_shadow() -> None:
    def hide(layer: Any, weight: torch.Tensor) -> None:
        layer.packed = weight.clone()
        layer.handler = torch.tensor(layer.packed.data_ptr())

    assert "'layers.0.handler' holds addresses" in refusal(hide)


def test_an_element_of_a_set_is_refused() -> None:
    def hide(layer: Any, weight: torch.Tensor) -> None:
        layer.scales = {weight * 2}

    message = refusal(hide)
    assert "'layers.0.scales[Ellipsis]' is in a set, which has no order" in message


def test_memory_that_nobody_can_look_into_is_refused() -> None:
    def hide(layer: Any, weight: torch.Tensor) -> None:
        layer.raw = weight.clone().untyped_storage()

    assert "'layers.0.raw' is a torch.storage.UntypedStorage, which may hold tensors" in refusal(hide)


SHARED = torch.zeros(3)


def test_a_tensor_of_both_that_loading_changes_is_refused() -> None:
    def hide(layer: Any, weight: torch.Tensor) -> None:
        SHARED.add_(1)
        layer.shared = SHARED

    assert "'layers.0.shared' is one tensor of both, and loading changes it" in refusal(hide)


def collected(hide: Callable[[Any, torch.Tensor], None], *, baked: bool) -> str:
    live, shadow, moving = prepared(hide)
    derived = Derived(live, shadow, moving, baked=baked)
    before = observe(live).numbers
    shadow.load(4)
    with pytest.raises(ValueError, match=r"^the model cannot take this version while it serves: ") as error:
        derived.collect()
    assert observe(live).numbers == before
    return str(error.value)


def test_a_number_that_compiled_code_contains_rejects_the_version() -> None:
    message = collected(as_a_float, baked=True)
    assert "'layers.0._k_scale_float' changed from 0." in message and "use enforce_eager" in message


def test_a_number_that_cannot_be_set_rejects_the_version() -> None:
    def hide(layer: Any, weight: torch.Tensor) -> None:
        layer.scales = (float(weight.max()),)

    assert "'layers.0.scales[0]' cannot be changed" in collected(hide, baked=False)


def test_a_tensor_that_a_round_loses_rejects_the_version() -> None:
    def hide(layer: Any, weight: torch.Tensor) -> None:
        layer.__dict__.pop("packed", None)
        if weight[0, 0] != Model(as_attribute, 4).layers[0].weight[0, 0]:  # type: ignore[index]
            layer.packed = weight * 2

    assert "'layers.0.packed' does not exist at '.packed'" in collected(hide, baked=False)
