"""The parameters and buffers that a swap copies, and their counterparts in the shadow."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from deployments.weights.staging.base import tied_refusal
from deployments.weights.staging.observation import Layout, is_plain, layout_of, other_layout
from deployments.weights.wire.checkpoint_schema import join_reasons

_LARGE_BYTES = 1 << 20
Place = tuple[int, Layout]  # address, and how it is laid out there


@dataclass
class Pairs:
    large: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    small: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = field(
        default_factory=dict
    )
    # Names and tensors of the shadow that are one in the live model.
    tied: list[tuple[str, str, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def add(self, live: torch.Tensor, shadow: torch.Tensor) -> None:
        # A large copy reaches the memory's bandwidth; a fused one two thirds of it.
        if live.numel() * live.itemsize >= _LARGE_BYTES and live.is_contiguous():
            self.large.append((live, shadow))
        else:
            to, source = self.small.setdefault((live.device, live.dtype), ([], []))
            to.append(live)
            source.append(shadow)

    def copy_to_live(self) -> None:
        for live, shadow in self.large:
            live.copy_(shadow)
        for live_ones, shadows in self.small.values():
            torch._foreach_copy_(live_ones, shadows)

    def copy_to_shadow(self) -> None:
        for live, shadow in self.large:
            shadow.copy_(live)
        for live_ones, shadows in self.small.values():
            torch._foreach_copy_(shadows, live_ones)
        for _, _, first, second in self.tied:
            second.copy_(first)

    def check_tied(self) -> None:
        for first, second, one, other in self.tied:
            if not torch.equal(one, other):
                raise ValueError(tied_refusal(first, second))


def pair(model: torch.nn.Module, shadow: torch.nn.Module) -> Pairs:
    """Pair every parameter and buffer once, tied ones too. Raises ValueError, naming those without a
    counterpart."""
    shadows = dict(named_tensors(shadow))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    pairs, problems = Pairs(), []
    seen: dict[Place, str] = {}  # live tensor's place -> name
    owners: dict[Place, str] = {}  # shadow tensor's place -> name
    for name, live in named_tensors(model):
        twin = shadows.get(name)
        if twin is None:
            problems.append(f"{name!r} has no counterpart")
            continue
        first = seen.setdefault((live.data_ptr(), layout_of(live)), name)
        if first != name:
            if twin.data_ptr() != shadows[first].data_ptr():
                pairs.tied.append((first, name, shadows[first], twin))
            continue
        owner = owners.setdefault((twin.data_ptr(), layout_of(twin)), name)
        if layout_of(live) != layout_of(twin):
            problems.append(other_layout(name, layout_of(live), layout_of(twin)))
        elif owner != name:
            problems.append(f"{name!r} and {owner!r} are one tensor there")
        elif live.data_ptr() != twin.data_ptr():
            pairs.add(live, twin)
        elif name in parameters:
            problems.append(f"{name!r} is one tensor of both")
    if problems:
        raise ValueError(
            "staging 'device' is not possible: a second instance of this model differs from the one that "
            f"serves: {join_reasons(problems)}; use 'host' or 'none'"
        )
    return pairs


def named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            # `derived` copies what a wrapper of other tensors wraps.
            if tensor is not None and is_plain(tensor):
                yield f"{path}.{name}" if path else name, tensor.data
