"""The marks that tell which parameters of a shadow were not filled."""

import pytest
import torch

from deployments.weights.staging.nan_poison import ROWS, Marks

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
        "whole": torch.arange(12).reshape(3, 4),
    }.items():
        model.register_parameter(name, torch.nn.Parameter(tensor.to(device), requires_grad=False))
    return model


MARKED = ["wide", "experts", "full", "column", "norm", "strided"]


def test_a_mark_stays_until_loading_writes_there() -> None:
    shadow, live = model_of("cuda", 1), model_of("cuda", 2)
    marks = Marks(shadow, live)
    assert marks.names == MARKED and marks.still_set() == []
    before = {name: parameter.clone() for name, parameter in shadow.named_parameters()}
    marks.set()
    assert marks.still_set() == MARKED
    for name in MARKED:
        parameter = shadow.get_parameter(name)
        columns = parameter.dim() > 1 and parameter.shape[-1] > 1
        places = parameter[..., [0, -1]] if columns else parameter
        assert places.isnan().all(), name
        inside = (parameter[..., 1:-1], before[name][..., 1:-1]) if columns else (places[:0], places[:0])
        assert torch.equal(*inside), name
    assert torch.equal(shadow.get_parameter("whole"), before["whole"])
    for name in MARKED:
        parameter = shadow.get_parameter(name)
        parameter.copy_(before[name])
        parameter[0] = float("inf")  # an odd number, and no mark
        assert name not in marks.still_set(), name
    for name, place in [(name, place) for name in MARKED for place in (0, -1)]:
        parameter = shadow.get_parameter(name)
        parameter.copy_(before[name])
        (parameter[-1] if parameter.dim() > 1 else parameter)[..., place] = float("nan")
        assert marks.still_set() == [name], "one was not written over"
        parameter.copy_(before[name])


def test_what_is_padding_gets_the_live_numbers() -> None:
    shadow, live = model_of("cuda", 1), model_of("cuda", 2)
    marks = Marks(shadow, live)
    marks.set()
    padded = shadow.get_parameter("wide")
    loaded = torch.randn_like(padded[:-2])
    padded[:-2].copy_(loaded)
    marks.put_live(["wide"])
    assert "wide" not in marks.still_set()
    assert torch.equal(padded[:-2], loaded)
    assert torch.equal(padded[-2:, [0, -1]], live.get_parameter("wide")[-2:, [0, -1]])
