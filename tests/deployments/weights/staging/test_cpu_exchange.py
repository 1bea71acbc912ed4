"""What a swap exchanges between two instances of one model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deployments.weights.staging.cpu_exchange import Exchange


class Layer(torch.nn.Module):
    """Packed after loading, as vLLM's linear layers are on a CPU."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2, 2), value), requires_grad=False)
        self.register_buffer("scale", torch.ones(1))
        self.scale_float = 1.0
        self.prefix = "layer"
        self.activation = lambda: 1

    def process(self) -> None:
        packed = self.weight.clone()
        self.cpu_linear: Callable[[], torch.Tensor] = lambda: packed


def instance(value: float = 0.0, *, processed: bool) -> torch.nn.Module:
    model = torch.nn.Sequential(Layer(value), Layer(value + 1))
    for layer in model:
        if processed:
            layer.process()
    return model


def content(model: torch.nn.Module) -> list[tuple[float, float]]:
    return [(float(layer.weight[0, 0]), float(layer.cpu_linear()[0, 0])) for layer in model]


@pytest.fixture
def live() -> torch.nn.Module:
    return instance(1.0, processed=True)


@pytest.fixture
def shadow() -> torch.nn.Module:
    return instance(processed=False)


def load(shadow: torch.nn.Module, value: float) -> None:
    for index, layer in enumerate(shadow):
        layer.weight.data = torch.full((2, 2), value + index)
        layer.process()


def test_parameters_and_what_was_made_of_them_are_exchanged(
    live: torch.nn.Module, shadow: torch.nn.Module
) -> None:
    weights = [layer.weight for layer in live]
    exchange = Exchange(live, shadow)
    for value in (5.0, 8.0):
        load(shadow, value)
        exchange.collect(())
        exchange.swap()
        assert content(live) == [(value, value), (value + 1, value + 1)]
    assert content(shadow) == [(5.0, 5.0), (6.0, 6.0)], "the former version"
    assert [layer.weight for layer in live] == weights, "kernels refer to the parameters"


def test_modules_of_which_nothing_was_loaded_keep_what_they_have(
    live: torch.nn.Module, shadow: torch.nn.Module
) -> None:
    exchange = Exchange(live, shadow)
    load(shadow, 5.0)
    exchange.collect({"1"})
    exchange.swap()
    assert content(live) == [(5.0, 5.0), (2.0, 2.0)]


def test_what_the_runner_adds_later_stays(live: torch.nn.Module, shadow: torch.nn.Module) -> None:
    exchange = Exchange(live, shadow)
    live[0].kv_cache = cache = torch.zeros(3)
    live[0].isa = "vec"
    load(shadow, 5.0)
    exchange.collect(())
    exchange.swap()
    assert live[0].kv_cache is cache
    assert live[0].isa == "vec"


def test_after_the_release_nothing_of_a_version_is_left(
    live: torch.nn.Module, shadow: torch.nn.Module
) -> None:
    exchange = Exchange(live, shadow)
    load(shadow, 5.0)
    exchange.release()
    assert not hasattr(shadow[0], "cpu_linear")
    with pytest.raises(ValueError, match=r"^0\.cpu_linear was not made again"):
        exchange.collect(())
    assert content(live) == [(1.0, 1.0), (2.0, 2.0)]


def test_a_parameter_of_another_shape_is_refused_and_nothing_is_exchanged(
    live: torch.nn.Module, shadow: torch.nn.Module
) -> None:
    exchange = Exchange(live, shadow)
    load(shadow, 5.0)
    shadow[1].weight.data = torch.zeros(3)
    with pytest.raises(ValueError, match=r"^'1\.weight' is .*\(2, 2\).* and became .*\(3,\)"):
        exchange.collect(())
    assert content(live) == [(1.0, 1.0), (2.0, 2.0)]


def test_one_tensor_of_the_live_model_takes_two_only_if_they_are_equal(live: torch.nn.Module) -> None:
    live[1].weight = live[0].weight
    exchange = Exchange(live, shadow := instance(processed=False))
    load(shadow, 5.0)
    with pytest.raises(ValueError, match=r"^'0\.weight' and '1\.weight' were equal in the checkpoint"):
        exchange.collect(())
    shadow[1].weight.data = shadow[0].weight.data.clone()
    exchange.collect(())
    exchange.swap()
    assert float(live[1].weight[0, 0]) == 5.0


def number(layer: Any) -> None:
    layer.scale_float = 0.5


def an_object(layer: Any) -> None:
    layer.packed = object()


def constant(layer: Any) -> None:
    layer.__dict__["table"] = torch.ones(2)


def another_function(layer: Any) -> None:
    layer.activation = lambda: 2


def a_buffer(layer: Any) -> None:
    layer.register_buffer("more", torch.ones(2))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (number, "0.scale_float comes from loading"),
        (an_object, "0.packed comes"),
        (a_buffer, "0.more is not"),
        (another_function, "0.activation comes"),
    ],
)
def test_whatever_else_loading_has_made_is_refused_by_name(
    change: Callable[[Any], None], name: str, live: torch.nn.Module, shadow: torch.nn.Module
) -> None:
    change(live[0])
    with pytest.raises(ValueError, match=f"^{name}"):
        Exchange(live, shadow)


def test_a_tensor_that_both_have_and_that_differs_is_refused(
    live: torch.nn.Module, shadow: torch.nn.Module
) -> None:
    constant(live[0])
    constant(shadow[0])
    Exchange(live, shadow)
    live[0].table.mul_(2)
    with pytest.raises(ValueError, match=r"^0\.table comes from loading"):
        Exchange(live, shadow)


def test_another_kind_of_module_is_refused(live: torch.nn.Module, shadow: torch.nn.Module) -> None:
    shadow[1] = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"^'1' is a Layer and there a Identity"):
        Exchange(live, shadow)


class Kernel:
    """Of attention: it keeps what it packs of another layer's weight."""

    def __init__(self) -> None:
        self.packed: torch.Tensor | None = None
        self.scale = 1.0


class Attention(Layer):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__(value)
        self.impl = Kernel()

    def process(self) -> None:
        super().process()
        self.impl.packed = self.weight.clone()
        self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


def test_what_a_kernel_packed_is_exchanged_and_given_back() -> None:
    live, shadow = torch.nn.Sequential(Attention(1.0)), torch.nn.Sequential(Attention())
    live[0].process()
    live[0].weight.data = live[0].weight.data.to(torch.bfloat16)  # empty: the type says nothing
    exchange = Exchange(live, shadow)
    for value in (5.0, 8.0):
        shadow[0].weight = torch.nn.Parameter(torch.full((2, 2), value), requires_grad=False)
        shadow[0].process()
        exchange.collect(())
        exchange.swap()
        assert float(live[0].impl.packed[0, 0]) == value
        exchange.release()
        assert not hasattr(shadow[0].impl, "packed"), "the former version is freed"
    with pytest.raises(ValueError, match=r"0\.packed was not made again"):
        exchange.collect(())


def test_what_else_differs_in_a_kernel_is_refused() -> None:
    live, shadow = torch.nn.Sequential(Attention(1.0)), torch.nn.Sequential(Attention())
    live[0].process()
    live[0].impl.scale = 2.0
    with pytest.raises(ValueError, match=r"0\.impl\.scale comes from loading"):
        Exchange(live, shadow)
