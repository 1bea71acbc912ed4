import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deployments.weights.staging.derived import Derived, Moving, classify, keep_constants
from deployments.weights.staging.observation import changed_tensors, observe
from deployments.weights.staging.pairs import pair
from deployments.weights.staging.reachable import path_name, reachable

Hide = Callable[[Any, torch.Tensor], None]


class Layer(torch.nn.Module):
    """A weight and whatever `hide` derives from it. Loading derives again."""

    def __init__(self, hide: Hide, seed: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.hide = hide
        self.load(seed)

    def load(self, seed: int) -> None:
        self.weight.data.copy_(torch.rand(4, 6, generator=torch.Generator().manual_seed(seed)))
        self.hide(self, self.weight.data)


class Model(torch.nn.Module):
    def __init__(self, hide: Hide, seed: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(hide, seed), Layer(hide, seed + 100)])

    def load(self, seed: int) -> None:
        for index, layer in enumerate(self.layers):
            layer.load(seed + 100 * index)  # type: ignore[operator]


class Wrapped:
    """As a kernel library wraps a tensor: no subclass, and no attribute of a module."""

    __slots__ = ("storage",)

    def __init__(self, data: torch.Tensor) -> None:
        self.storage = SimpleNamespace(data=data)


class Kernel:
    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def as_attribute(layer: Any, weight: torch.Tensor) -> None:
    layer.transposed = weight.t().contiguous()


def in_containers(layer: Any, weight: torch.Tensor) -> None:
    layer.config = {"w": [(weight * 2,)], ("a", 1): weight * 3}


def wrapped(layer: Any, weight: torch.Tensor) -> None:
    layer.__dict__.pop("w13", None)
    layer.w13 = Wrapped(weight * 2)


def in_a_quantization_method(layer: Any, weight: torch.Tensor) -> None:
    layer.quant_method = SimpleNamespace(precision=Wrapped(weight * 2), kernel=Kernel(weight.sum(1)))


def in_a_closure(layer: Any, weight: torch.Tensor) -> None:
    packed = weight.t().contiguous()
    layer.linear = lambda x: x @ packed


def in_a_partial(layer: Any, weight: torch.Tensor) -> None:
    layer.linear = functools.partial(torch.mm, mat2=weight.t().contiguous())


def behind_a_method(layer: Any, weight: torch.Tensor) -> None:
    layer.run = Kernel(weight.sum(1)).apply


def in_a_module_outside_the_tree(layer: Any, weight: torch.Tensor) -> None:
    inner = torch.nn.Linear(6, 4, bias=False)
    inner.weight.data.copy_(weight * 2)
    layer.others = (inner,)


def on_a_parameter(layer: Any, weight: torch.Tensor) -> None:
    layer.weight.scale = weight.amax(1)


def in_numpy(layer: Any, weight: torch.Tensor) -> None:
    layer.table_of_scales = weight.sum(1).double().numpy() + 1


def as_a_float(layer: Any, weight: torch.Tensor) -> None:
    layer._k_scale_float = float(weight.max())


def as_a_whole_number(layer: Any, weight: torch.Tensor) -> None:
    layer.holder = {"largest": int(weight.max() * 1e6)}


HIDING = [
    as_attribute,
    in_containers,
    wrapped,
    in_a_quantization_method,
    in_a_closure,
    in_a_partial,
    behind_a_method,
    in_a_module_outside_the_tree,
    on_a_parameter,
    in_numpy,
    as_a_float,
    as_a_whole_number,
]


def prepared(hide: Hide) -> tuple[Model, Model, Moving]:
    """The live model with seed 1, its shadow, and what follows."""
    live = Model(hide, 1)
    before = observe(live)
    shadow = Model(hide, 2)
    first = observe(shadow)
    shadow.load(3)
    return live, shadow, classify(before, first, observe(shadow))


@pytest.mark.parametrize("hide", HIDING, ids=lambda hide: hide.__name__)
def test_derived_state_is_swapped(hide: Hide) -> None:
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


def test_a_swap_keeps_addresses_for_captured_graphs() -> None:
    live, shadow, moving = prepared(wrapped)
    layer: Any = live.layers[0]
    address = layer.w13.storage.data.data_ptr()
    derived = Derived(live, shadow, moving, baked=True)
    shadow.load(4)
    derived.collect()
    derived.swap()
    assert layer.w13.storage.data.data_ptr() == address
    assert torch.equal(layer.w13.storage.data, Model(wrapped, 4).layers[0].weight * 2)  # type: ignore[operator]


def test_state_independent_of_weights_is_constant() -> None:
    def hide(layer: Any, weight: torch.Tensor) -> None:
        layer.__dict__.setdefault("cos_sin", torch.arange(8.0))
        layer.__dict__.setdefault("scratch", torch.full((3,), torch.nan))
        layer.view = weight[1:3]
        layer.eps = 1e-6

    live, _, moving = prepared(hide)
    assert moving == Moving(tensors=(), numbers=())
    live.layers[0].kv_cache = torch.zeros(5)  # allocated later: nobody asks about it


def test_a_mark_that_vllm_sets_after_loading_does_not_follow_the_weights() -> None:
    live, shadow = Model(as_attribute, 1), Model(as_attribute, 2)
    live.layers[0].is_draft_layer = True
    first = observe(shadow)
    shadow.load(3)
    assert classify(observe(live), first, observe(shadow)).numbers == ()


def test_constants_survive_sleep_level_2() -> None:
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


def only_initially(layer: Any, weight: torch.Tensor) -> None:
    layer.__dict__.setdefault("fused", weight * 2)


def a_number_only_initially(layer: Any, weight: torch.Tensor) -> None:
    layer.__dict__.setdefault("scale", float(weight.max()))


def a_parameter_only_initially(layer: Any, weight: torch.Tensor) -> None:
    if "fused" not in layer._parameters:
        layer.fused = torch.nn.Parameter(weight * 2, requires_grad=False)


def in_the_first_instance_alone(layer: Any, weight: torch.Tensor, instances: list[Any]) -> None:
    instances.append(layer)
    if len(instances) == 1:
        layer.extra = weight * 2


def of_another_size(layer: Any, weight: torch.Tensor, instances: list[Any]) -> None:
    instances.append(layer)
    layer.packed = weight.flatten()[: len(instances)].clone()


def an_address(layer: Any, weight: torch.Tensor) -> None:
    layer.packed = weight.clone()
    layer.handler = torch.tensor(layer.packed.data_ptr())


def in_a_set(layer: Any, weight: torch.Tensor) -> None:
    layer.scales = {weight * 2}


def in_a_storage(layer: Any, weight: torch.Tensor) -> None:
    layer.raw = weight.clone().untyped_storage()


SHARED = torch.zeros(3)


def in_both_instances(layer: Any, weight: torch.Tensor) -> None:
    SHARED.add_(1)
    layer.shared = SHARED


@pytest.mark.parametrize(
    ("hide", "message"),
    [
        (only_initially, "'layers.0.fused' comes from the weights, and loading does not renew it"),
        (a_number_only_initially, "'layers.0.scale' comes from the weights"),
        (
            a_parameter_only_initially,
            "'layers.0.fused' comes from the weights, and loading does not renew it",
        ),
        (in_the_first_instance_alone, "'layers.0.extra' is a tensor that it does not have"),
        (
            of_another_size,
            "'layers.0.packed' is torch.float32 [1] (1,) on cpu and in the second instance torch.float32 [5]",
        ),
        (an_address, "'layers.0.handler' holds addresses"),
        (in_a_set, "'layers.0.scales[Ellipsis]' is in a set, which has no order"),
        (in_a_storage, "'layers.0.raw' is a torch.storage.UntypedStorage, which may hold tensors"),
        (in_both_instances, "'layers.0.shared' is one tensor of both, and loading changes it"),
    ],
)
def test_derived_state_that_cannot_be_renewed_is_refused_by_name(hide: Any, message: str) -> None:
    if hide in (in_the_first_instance_alone, of_another_size):
        hide = functools.partial(hide, instances=[])
    pattern = r"^staging 'device' is not possible: .*; use 'host' or 'none'$"
    with pytest.raises(ValueError, match=pattern) as error:
        prepared(hide)
    assert message in str(error.value)


def collected(hide: Hide, *, baked: bool) -> str:
    live, shadow, moving = prepared(hide)
    derived = Derived(live, shadow, moving, baked=baked)
    before = observe(live).numbers
    shadow.load(4)
    with pytest.raises(ValueError, match=r"^the model cannot take this version while it serves: ") as error:
        derived.collect()
    assert observe(live).numbers == before
    return str(error.value)


def test_a_changed_number_in_compiled_code_rejects_the_version() -> None:
    message = collected(as_a_float, baked=True)
    assert "'layers.0._k_scale_float' changed from 0." in message and "use enforce_eager" in message


def test_an_immutable_number_rejects_the_version() -> None:
    def hide(layer: Any, weight: torch.Tensor) -> None:
        layer.scales = (float(weight.max()),)

    assert "'layers.0.scales[0]' cannot be changed" in collected(hide, baked=False)


def test_a_tensor_that_a_round_loses_rejects_the_version() -> None:
    def hide(layer: Any, weight: torch.Tensor) -> None:
        layer.__dict__.pop("packed", None)
        if weight[0, 0] != Model(as_attribute, 4).layers[0].weight[0, 0]:  # type: ignore[index]
            layer.packed = weight * 2

    assert "'layers.0.packed' does not exist at '.packed'" in collected(hide, baked=False)


def test_numpy_numbers_are_found() -> None:
    model = torch.nn.Module()
    model.scale = np.float32(0.5)  # type: ignore[assignment]
    assert "scale" in map(path_name, reachable(model).numbers)


# -- which tensor of the shadow belongs to which one that serves ------------------------------------


class Tied(torch.nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(3, 2, bias=False)
        self.head = torch.nn.Linear(3, 2, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_tied_live_weights_must_be_staged_equal() -> None:
    live, shadow = Tied(True), Tied(False)
    pairs = pair(live, shadow)
    with torch.no_grad():
        pairs.copy_to_shadow()
        pairs.check_tied()
        shadow.head.weight.add_(1)
    with pytest.raises(ValueError, match=r"^'embed.weight' and 'head.weight' were equal in the checkpoint"):
        pairs.check_tied()


def test_a_shadow_with_tied_weights_is_refused_if_the_live_ones_are_not() -> None:
    with pytest.raises(ValueError, match=r"'head\.weight' and 'embed\.weight' are one tensor there"):
        pair(Tied(False), Tied(True))
