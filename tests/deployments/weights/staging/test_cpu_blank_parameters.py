"""Parameters that have no memory between rounds, and know what was loaded."""

import torch

from deployments.weights.staging.cpu_shadow import BlankParameter, Loaded, blank_parameters


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 3)
        self.second = torch.nn.Linear(4, 3, bias=False)
        self.second.weight = self.first.weight


def allocate(blanks: list[BlankParameter]) -> None:
    for blank in blanks:
        blank.allocate()


def by_name(model: torch.nn.Module) -> tuple[list[BlankParameter], dict[str, torch.Tensor]]:
    blanks = blank_parameters(model)
    allocate(blanks)
    return blanks, {blank.names[0]: blank.parameter.data for blank in blanks}


def loaded(blanks: list[BlankParameter]) -> dict[str, Loaded]:
    return {blank.names[0]: blank.loaded() for blank in blanks}


@torch.no_grad()
def test_what_was_loaded_of_each_parameter_is_known() -> None:
    model = Tied()
    blanks, data = by_name(model)
    assert loaded(blanks) == {"first.weight": Loaded.NOTHING, "first.bias": Loaded.NOTHING}
    data["first.weight"][:2] = 1.0
    data["first.bias"].fill_(0.0)
    assert loaded(blanks) == {"first.weight": Loaded.PART, "first.bias": Loaded.ALL}
    data["first.weight"][2] = 1.0
    assert loaded(blanks) == {"first.weight": Loaded.ALL, "first.bias": Loaded.ALL}


def test_tied_parameters_are_one() -> None:
    [weight, _] = blank_parameters(Tied())
    assert weight.names == ["first.weight", "second.weight"]


@torch.no_grad()
def test_padding_is_zero() -> None:
    blanks, data = by_name(Tied())
    data["first.weight"][:2] = 1.0
    [weight, _] = blanks
    weight.pad()
    assert data["first.weight"].tolist() == [[1.0] * 4, [1.0] * 4, [0.0] * 4]


@torch.no_grad()
def test_padding_at_the_end_of_the_rows_is_zero() -> None:
    blanks, data = by_name(Tied())
    data["first.weight"][:, :3] = 1.0
    [weight, _] = blanks
    assert weight.loaded() is Loaded.PART
    weight.pad()
    assert data["first.weight"].tolist() == [[1.0, 1.0, 1.0, 0.0]] * 3


@torch.no_grad()
def test_what_processing_made_is_replaced_and_has_no_memory_afterwards() -> None:
    model = Tied()
    weight = model.first.weight
    blanks = blank_parameters(model)
    assert weight.numel() == 0
    allocate(blanks)
    assert weight.shape == (3, 4)
    packed = torch.nn.Parameter(torch.zeros(5), requires_grad=False)
    model.first.weight = packed
    for blank in blanks:
        blank.release()
    assert model.first.weight is model.second.weight is weight
    assert sum(parameter.numel() for parameter in model.parameters()) == 0
    allocate(blanks)
    assert model.second.weight.shape == (3, 4)
