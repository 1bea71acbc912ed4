from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainers import tiny
from trainers.sources import ParameterSource, checkpoint_views, layer_groups


@pytest.mark.parametrize("kind", [*tiny.KINDS, *tiny.SEEING])
def test_names_shapes_and_values_are_those_of_the_saved_checkpoint(tmp_path: Path, kind: str) -> None:
    model = tiny.model(kind)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    source = ParameterSource(model)
    sent = list(source)
    assert sorted(name for name, _ in sent) == sorted(expected)
    for name, tensor in sent:
        assert torch.equal(tensor, expected[name]), name
        assert tensor.is_contiguous()
    assert [(name, t.dtype, tuple(t.shape)) for name, t in sent] == [
        (spec.name, spec.dtype, spec.shape) for spec in source.specs()
    ]


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_floating_point_tensors_are_cast(kind: str) -> None:
    model = tiny.model(kind)
    source = ParameterSource(model, dtype=torch.bfloat16)
    assert {tensor.dtype for _, tensor in source} == {torch.bfloat16}
    assert {spec.dtype for spec in source.specs()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_an_iteration_reads_the_current_weights() -> None:
    model = tiny.model("llama")
    source = ParameterSource(model)
    before = {name: tensor.clone() for name, tensor in source}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    for name, tensor in source:
        torch.testing.assert_close(tensor, before[name] + 1.0)


def test_what_the_model_lacks_of_its_checkpoint_is_yielded_as_it_is() -> None:
    model, frozen = tiny.model("llama"), {"tower.weight": torch.ones(2, 3), "tower.ids": torch.arange(4)}
    source = ParameterSource(model, dtype=torch.bfloat16, frozen=frozen)
    sent = list(source)
    assert [name for name, _ in sent[-2:]] == list(frozen)
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in sent[-2:])
    assert [(name, t.dtype, tuple(t.shape)) for name, t in sent] == [
        (spec.name, spec.dtype, spec.shape) for spec in source.specs()
    ]
    assert len(source.resident() or ()) == len(sent)


def test_a_layer_is_a_group_and_an_expert_is_not() -> None:
    names = [
        "model.embed.weight",
        "model.layers.0.a",
        "model.layers.0.mlp.experts.3.b",
        "model.layers.10.a",
        "norm",
    ]
    assert layer_groups(names) == [names[:1], names[1:3], names[3:4], names[4:]]


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_resident_tensors_equal_those_of_an_iteration_and_change_with_the_model(kind: str) -> None:
    model = tiny.model(kind)
    source = ParameterSource(model)
    resident = source.resident()
    assert resident is not None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert source.resident() is resident
    for (name, yielded), tensor in zip(source, resident, strict=True):
        assert torch.equal(tensor, yielded), name


def test_a_replaced_parameter_makes_a_new_resident_list() -> None:
    model = tiny.model("qwen3")
    source = ParameterSource(model)
    before = source.resident()
    model.model.norm.weight = torch.nn.Parameter(torch.ones(16))
    after = source.resident()
    assert before is not None and after is not None and after is not before
    assert torch.equal(
        after[[spec.name for spec in source.specs()].index("model.norm.weight")], torch.ones(16)
    )


def test_computed_tensors_are_converted_in_every_pass_and_never_resident() -> None:
    def doubled(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor * 2 for name, tensor in state.items()}

    model = tiny.model("llama")
    source = ParameterSource(model, convert=doubled)
    assert source.resident() is None
    for _ in range(2):
        yielded = dict(source)
        assert list(yielded) == [spec.name for spec in source.specs()]
        assert all(torch.equal(yielded[name], 2 * model.state_dict()[name]) for name in yielded)
        with torch.no_grad():
            model.model.norm.weight.add_(1.0)


STATE = {"w": torch.arange(6.0).view(2, 3), "v": torch.arange(4.0)}
Tensors = dict[str, torch.Tensor]


def renamed(state: Tensors) -> Tensors:
    return {f"model.{name}": tensor for name, tensor in state.items()}


def split(state: Tensors) -> Tensors:
    first, second = state["w"].chunk(2)
    return {"a": first.clone(), "b": second.contiguous(), "v": state["v"]}


def transposed(state: Tensors) -> Tensors:
    return {"w": state["w"].t().contiguous()}


def partly_doubled(state: Tensors) -> Tensors:
    return {"w": state["w"], "v": state["v"] * 2}


def zeroed(state: Tensors) -> Tensors:
    state["w"].zero_()
    return state


@pytest.mark.parametrize("convert", [renamed, split, transposed])
def test_parts_of_tensors_are_views_even_if_the_conversion_copies_them(convert: Any) -> None:
    views = checkpoint_views(STATE, convert)
    assert views is not None and [view.name for view in views] == list(convert(STATE))
    for view in views:
        found = view.of(STATE[view.state_name])
        assert torch.equal(found, convert(STATE)[view.name])
        assert found.untyped_storage().data_ptr() == STATE[view.state_name].untyped_storage().data_ptr()


@pytest.mark.parametrize("convert", [partly_doubled, zeroed])
def test_a_layer_in_which_something_is_computed_has_no_views(convert: Any) -> None:
    assert checkpoint_views(STATE, convert) is None
    assert STATE["w"].sum() == 15, "the trace runs on meta tensors"
