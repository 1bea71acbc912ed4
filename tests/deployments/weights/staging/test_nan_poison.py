"""The poison that shows which parameters of a shadow were not filled."""

import pytest
import torch

from deployments.weights.staging.nan_poison import ROWS, NanPoison

pytestmark = pytest.mark.gpu


def model_of(device: str, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Module()
    for name, tensor in {
        "wide": torch.randn(2 * ROWS + 3, 33, dtype=torch.bfloat16),
        "experts": torch.randn(3, ROWS - 1, 8, dtype=torch.float16),
        "full": torch.randn(5, 7),
        "column": torch.randn(ROWS + 1, 1),
        "norm": torch.randn(ROWS + 1, dtype=torch.bfloat16),
        "strided": torch.randn(6, 9, dtype=torch.bfloat16).t(),
        "empty": torch.randn(0, 4),
        "integers": torch.arange(12).reshape(3, 4),
    }.items():
        model.register_parameter(name, torch.nn.Parameter(tensor.to(device), requires_grad=False))
    return model


POISONED = ["wide", "experts", "full", "column", "norm", "strided"]


def test_poison_stays_until_loading_writes_there() -> None:
    shadow, live = model_of("cuda", 1), model_of("cuda", 2)
    poison = NanPoison(shadow, live)
    assert poison.names == POISONED and poison.remaining() == []
    before = {name: parameter.clone() for name, parameter in shadow.named_parameters()}
    poison.apply()
    assert poison.remaining() == POISONED
    for name in POISONED:
        parameter = shadow.get_parameter(name)
        columns = parameter.dim() > 1 and parameter.shape[-1] > 1
        outer = parameter[..., [0, -1]] if columns else parameter
        assert outer.isnan().all(), name
        inside = (parameter[..., 1:-1], before[name][..., 1:-1]) if columns else (outer[:0], outer[:0])
        assert torch.equal(*inside), name
    assert torch.equal(shadow.get_parameter("integers"), before["integers"])
    for name in POISONED:
        parameter = shadow.get_parameter(name)
        parameter.copy_(before[name])
        parameter[0] = float("inf")  # not finite, and not poison
        assert name not in poison.remaining(), name
    for name, column in [(name, column) for name in POISONED for column in (0, -1)]:
        parameter = shadow.get_parameter(name)
        parameter.copy_(before[name])
        (parameter[-1] if parameter.dim() > 1 else parameter)[..., column] = float("nan")
        assert poison.remaining() == [name], "one was not overwritten"
        parameter.copy_(before[name])


def test_padding_gets_the_live_numbers() -> None:
    shadow, live = model_of("cuda", 1), model_of("cuda", 2)
    poison = NanPoison(shadow, live)
    poison.apply()
    padded = shadow.get_parameter("wide")
    loaded = torch.randn_like(padded[:-2])
    padded[:-2].copy_(loaded)
    poison.restore_live(["wide"])
    assert "wide" not in poison.remaining()
    assert torch.equal(padded[:-2], loaded)
    assert torch.equal(padded[-2:, [0, -1]], live.get_parameter("wide")[-2:, [0, -1]])
