"""What a model derives from its weights and keeps beside its parameters. A value equal in the live instance,
its shadow and the shadow loaded again is constant; the rest must be renewed by a load."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from deployments.weights.staging.observation import (
    Observation,
    changed,
    differing,
    layout_of,
    other_layout,
    same,
)
from deployments.weights.staging.reachable import (
    IN_SET,
    AccessPath,
    Number,
    assign,
    path_name,
    resolve,
    tensor_at,
)
from deployments.weights.wire.checkpoint_schema import join_reasons

_ADDRESS = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    tensors: tuple[AccessPath, ...]
    numbers: tuple[AccessPath, ...]


def classify(live: Observation, first: Observation, second: Observation, *, layerwise: bool = True) -> Moving:
    """Raises ValueError, naming what cannot follow the weights, and why."""
    before, after = first.derivable, second.derivable
    found = [*differing(live, first), *differing(live, second), *differing(first, second)]
    if layerwise:  # renewed objects may be equal by chance
        found += [
            path for path in after if path in before and before[path].object() is not after[path].object()
        ]
    moving = list(dict.fromkeys(found))
    problems = [
        f"{path_name(path)!r} is a {kind}, which may hold tensors out of sight"
        for path, kind in live.closed.items()
    ]
    for path, content in live.tensors.items():
        twin = second.tensors.get(path)
        if twin is None:
            problems.append(f"{path_name(path)!r} is a tensor that it does not have")
        elif twin.layout != content.layout:
            problems.append(other_layout(path_name(path), content.layout, twin.layout))
        elif path in moving and twin.address == content.address:
            problems.append(f"{path_name(path)!r} is one tensor of both, and loading changes it")
    stale = [path for path in moving if not _is_renewed(path, first, second)]
    stale += [
        path
        for path in changed(live.parameters, second.parameters)
        if path in first.parameters and not first.parameters[path].differs(second.parameters[path])
    ]
    problems += [
        f"{path_name(path)!r} comes from the weights, and loading does not renew it" for path in stale
    ]
    problems += [f"{path_name(path)!r} is in a set, which has no order" for path in moving if IN_SET in path]
    problems += [f"{path_name(path)!r} holds addresses" for path in moving if _holds_addresses(path, live)]
    if problems:
        raise ValueError(
            "staging 'device' is not possible: a second instance of this model does not follow what the one "
            f"that serves keeps beside its parameters: {join_reasons(problems)}; use 'host' or 'none'"
        )
    # A number that only loading sets appears in the shadow with its first round.
    late = [path for path in live.numbers if path not in second.numbers]
    return Moving(
        tensors=tuple(path for path in moving if path in live.tensors),
        numbers=(*(path for path in moving if path in live.numbers), *late),
    )


def keep_constants(live: Observation, moving: Moving, device: torch.device) -> None:
    """Move constants out of memory that sleeps (level 2 loses it), before anything is captured."""
    for path in live.tensors.keys() - set(moving.tensors):
        tensor = live.tensors[path].object()
        if tensor is not None and tensor.device == device:
            tensor.data = tensor.detach().clone()  # the same object: others refer to it too


class Derived:
    """The swap of what `classify` found. `baked`: compiled or captured code contains the live numbers."""

    def __init__(
        self, model: torch.nn.Module, shadow: torch.nn.Module, moving: Moving, *, baked: bool
    ) -> None:
        self._model, self._shadow, self._moving, self._baked = model, shadow, moving, baked
        # Held here: captured graphs refer to this memory.
        self._live: Mapping[AccessPath, torch.Tensor] = {
            path: tensor_at(model, path) for path in moving.tensors
        }
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._changes: list[tuple[AccessPath, Number]] = []

    def collect(self) -> None:
        problems: list[str] = []
        self._copies, self._changes = [], []
        for path, live in self._live.items():
            try:
                twin = tensor_at(self._shadow, path)
            except LookupError as error:
                problems.append(str(error))
                continue
            if layout_of(twin) != layout_of(live):
                problems.append(other_layout(path_name(path), layout_of(live), layout_of(twin)))
            else:
                self._copies.append((live, twin))
        for path in self._moving.numbers:
            problems += self._collect_number(path)
        if problems:
            raise ValueError(f"the model cannot take this version while it serves: {join_reasons(problems)}")

    def swap(self) -> None:
        for live, twin in self._copies:
            live.copy_(twin)
        for path, number in self._changes:
            assign(self._model, path, number)

    def _collect_number(self, path: AccessPath) -> list[str]:
        try:
            number, live = resolve(self._shadow, path), resolve(self._model, path)
        except LookupError:
            return []  # an attribute of the initial load only
        if same(number, live):
            return []
        if self._baked:
            return [
                f"{path_name(path)!r} changed from {live} to {number}, and compiled or captured code has the "
                "old number; use enforce_eager"
            ]
        try:
            assign(self._model, path, live)
        except TypeError as error:
            return [f"{error}; it would change from {live} to {number}"]
        self._changes.append((path, number))
        return []


def _is_renewed(path: AccessPath, first: Observation, second: Observation) -> bool:
    if path in second.numbers:
        return path not in first.numbers or not same(first.numbers[path], second.numbers[path])
    before, after = first.derivable.get(path), second.derivable.get(path)
    return before is None or after is None or before.is_older(after)


def _holds_addresses(path: AccessPath, live: Observation) -> bool:
    content = live.tensors.get(path)
    if content is not None:
        tensor = content.object()
        return tensor is not None and tensor.dtype == torch.int64 and bool((tensor >= _ADDRESS).any())
    number = live.numbers.get(path)
    return isinstance(number, int) and number >= _ADDRESS
