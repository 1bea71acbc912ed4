import torch

from trainers.sources import checkpoint_views

STATE = {"w": torch.arange(6.0).view(2, 3), "v": torch.arange(4.0)}
Tensors = dict[str, torch.Tensor]


def renamed(state: Tensors) -> Tensors:
    return {f"model.{name}": tensor for name, tensor in state.items()}


def split(state: Tensors) -> Tensors:
    first, second = state["w"].chunk(2)
    return {"a": first.clone(), "b": second.contiguous(), "v": state["v"]}


def transposed(state: Tensors) -> Tensors:
    return {"w": state["w"].t().contiguous()}


def doubled(state: Tensors) -> Tensors:
    return {"w": state["w"], "v": state["v"] * 2}


def zeroed(state: Tensors) -> Tensors:
    state["w"].zero_()
    return state


def test_renamed_tensors_are_views_of_all_of_their_memory() -> None:
    views = checkpoint_views(STATE, renamed)
    assert views is not None
    assert [(view.name, view.state_name, view.shape) for view in views] == [
        ("model.w", "w", (2, 3)),
        ("model.v", "v", (4,)),
    ]


def test_parts_are_views_even_if_the_conversion_copies_them() -> None:
    views = checkpoint_views(STATE, split)
    assert views is not None
    for view in views:
        expected = split(STATE)[view.name]
        found = view.of(STATE[view.state_name])
        assert torch.equal(found, expected)
        assert found.untyped_storage().data_ptr() == STATE[view.state_name].untyped_storage().data_ptr()


def test_a_transposed_tensor_is_a_view() -> None:
    views = checkpoint_views(STATE, transposed)
    assert views is not None and len(views) == 1
    assert torch.equal(views[0].of(STATE["w"]), STATE["w"].t())


def test_a_layer_in_which_something_is_computed_has_no_views() -> None:
    assert checkpoint_views(STATE, doubled) is None


def test_a_conversion_that_writes_in_place_has_no_views() -> None:
    assert checkpoint_views(STATE, zeroed) is None
    assert STATE["w"].sum() == 15, "the trace runs on meta tensors"
