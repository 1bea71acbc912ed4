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


def content(model: torch.nn.Module) -> list[tuple[float, float]]:
    return [(float(layer.weight[0, 0]), float(layer.cpu_linear()[0, 0])) for layer in model]


@pytest.fixture
def live() -> torch.nn.Module:
    model = torch.nn.Sequential(Layer(1.0), Layer(2.0))
    for layer in model:
        layer.process()
    return model


@pytest.fixture
def shadow() -> torch.nn.Module:
    return torch.nn.Sequential(Layer(), Layer())


def load(shadow: torch.nn.Module, value: float) -> None:
    for index, layer in enumerate(shadow):
        layer.weight.data = torch.full((2, 2), value + index)
        layer.process()


def test_parameters_and_derived_attributes_are_exchanged(
    live: torch.nn.Module, shadow: torch.nn.Module
) -> None:
    weights = [layer.weight for layer in live]
    exchange = Exchange(live, shadow)
    live[0].kv_cache = cache = torch.zeros(3)  # the runner's
    for value in (5.0, 8.0):
        load(shadow, value)
        exchange.collect(())
        exchange.swap()
        assert content(live) == [(value, value), (value + 1, value + 1)]
    assert content(shadow) == [(5.0, 5.0), (6.0, 6.0)], "the former version"
    assert [layer.weight for layer in live] == weights, "kernels refer to the parameters"
    assert live[0].kv_cache is cache


def test_untouched_modules_keep_their_tensors(live: torch.nn.Module, shadow: torch.nn.Module) -> None:
    exchange = Exchange(live, shadow)
    load(shadow, 5.0)
    exchange.collect({"1"})
    exchange.swap()
    assert content(live) == [(5.0, 5.0), (2.0, 2.0)]


def test_release_frees_the_version(live: torch.nn.Module, shadow: torch.nn.Module) -> None:
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
    with pytest.raises(
        ValueError, match=r"^'1\.weight' is .* \[2, 2\] .* and in the second instance .* \[3\] "
    ):
        exchange.collect(())
    assert content(live) == [(1.0, 1.0), (2.0, 2.0)]


def test_tied_weights_must_arrive_equal(live: torch.nn.Module, shadow: torch.nn.Module) -> None:
    live[1].weight = live[0].weight
    exchange = Exchange(live, shadow)
    load(shadow, 5.0)
    with pytest.raises(ValueError, match=r"^'0\.weight' and '1\.weight' were equal in the checkpoint"):
        exchange.collect(())
    shadow[1].weight.data = shadow[0].weight.data.clone()
    exchange.collect(())
    exchange.swap()
    assert float(live[1].weight[0, 0]) == 5.0


def number(live: Any, shadow: Any) -> None:
    live[0].scale_float = 0.5


def an_object(live: Any, shadow: Any) -> None:
    live[0].packed = object()


def another_constant(live: Any, shadow: Any) -> None:
    live[0].table, shadow[0].table = torch.ones(2), torch.zeros(2)


def another_function(live: Any, shadow: Any) -> None:
    live[0].activation = lambda: 2


def a_buffer(live: Any, shadow: Any) -> None:
    live[0].register_buffer("more", torch.ones(2))


def another_module(live: Any, shadow: Any) -> None:
    shadow[0] = torch.nn.Identity()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (number, "0.scale_float comes from loading"),
        (an_object, "0.packed comes from loading"),
        (another_constant, "0.table comes from loading"),
        (a_buffer, "0.more is not in both"),
        (another_function, "0.activation comes from loading"),
        (another_module, "'0' is a Layer and there a Identity"),
    ],
)
def test_other_differences_are_refused_by_name(
    change: Callable[[Any, Any], None], message: str, live: torch.nn.Module, shadow: torch.nn.Module
) -> None:
    change(live, shadow)
    with pytest.raises(ValueError, match=f"^{message}"):
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


def test_tensors_packed_by_an_attention_kernel_are_exchanged_and_freed() -> None:
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
    live[0].impl.scale = 2.0
    with pytest.raises(ValueError, match=r"0\.impl\.scale comes from loading"):
        Exchange(live, torch.nn.Sequential(Attention()))
