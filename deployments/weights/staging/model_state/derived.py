"""What a model keeps of its weights beside its parameters: found, and brought along by a swap.

Three states of two instances are compared: the live one, its shadow with other weights, and the shadow
after it was loaded a second time, again with other weights. Whatever is equal in all three is constant.
Whatever differs comes from the weights and must follow them, so it needs a counterpart that a second load
renews. If it has none, the engine does not start.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from deployments.weights.staging.model_state.observation import (
    Layout,
    Observation,
    changed,
    differing,
    layout_of,
    same,
)
from deployments.weights.staging.model_state.reachable import (
    Element,
    Number,
    Way,
    follow,
    name_of,
    put,
    tensor_at,
)
from deployments.weights.wire.checkpoint_schema import join_reasons

_ADDRESS = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """The ways to everything beside the parameters that comes from the weights."""

    tensors: tuple[Way, ...]
    numbers: tuple[Way, ...]


def classify(live: Observation, first: Observation, second: Observation, *, layerwise: bool = True) -> Moving:
    """What must follow the weights.

    Args:
        first: of the shadow.
        second: of the shadow, after it was loaded again.
        layerwise: rounds process weights after loading them.

    Raises:
        ValueError: something cannot follow; names it, and says why.
    """
    before, after = first.tensors | first.buffers, second.tensors | second.buffers
    found = [*differing(live, first), *differing(live, second), *differing(first, second)]
    if layerwise:  # what loading makes anew may come from weights even if it is equal by chance
        found += [way for way in after if way in before and before[way].object() is not after[way].object()]
    moving = list(dict.fromkeys(found))
    problems = [
        f"{name_of(way)!r} is a {kind}, which may hold tensors that nobody can see"
        for way, kind in live.closed.items()
    ]
    for way, content in live.tensors.items():
        twin = second.tensors.get(way)
        if twin is None:
            problems.append(f"{name_of(way)!r} is a tensor that it does not have")
        elif twin.layout != content.layout:
            problems.append(f"{name_of(way)!r} is {_words(content.layout)} and there {_words(twin.layout)}")
        elif way in moving and twin.address == content.address:
            problems.append(f"{name_of(way)!r} is one tensor of both, and loading changes it")
    stale = [way for way in moving if not _is_renewed(way, first, second)]
    stale += [
        way
        for way in changed(live.parameters, second.parameters)
        if way in first.parameters and not first.parameters[way].differs(second.parameters[way])
    ]
    problems += [f"{name_of(way)!r} comes from the weights, and loading does not renew it" for way in stale]
    problems += [f"{name_of(way)!r} is in a set, which has no order" for way in moving if Element() in way]
    problems += [f"{name_of(way)!r} holds addresses" for way in moving if _holds_addresses(way, live)]
    if problems:
        raise ValueError(
            "staging 'device' is not possible: a second instance of this model does not follow what the one "
            f"that serves keeps beside its parameters: {join_reasons(problems)}; use 'host' or 'none'"
        )
    # A number that only loading sets appears in the shadow with its first round.
    late = [way for way in live.numbers if way not in second.numbers]
    return Moving(
        tensors=tuple(way for way in moving if way in live.tensors),
        numbers=(*(way for way in moving if way in live.numbers), *late),
    )


def keep_constants(live: Observation, moving: Moving, device: torch.device) -> None:
    """Move the constants of the live model out of the memory that sleeps. At level 2 its content is lost, no
    round replaces a constant, and vLLM saves only buffers. Before anything is captured: addresses change."""
    for way in live.tensors.keys() - set(moving.tensors):
        tensor = live.tensors[way].object()
        if tensor is not None and tensor.device == device:
            tensor.data = tensor.detach().clone()  # the same object: others refer to it too


class Derived:
    """The swap of what `classify` found.

    Args:
        baked: numbers of the live model are part of compiled or captured code, and cannot be changed.
    """

    def __init__(
        self, model: torch.nn.Module, shadow: torch.nn.Module, moving: Moving, *, baked: bool
    ) -> None:
        self._model, self._shadow, self._moving, self._baked = model, shadow, moving, baked
        # Held here: what was captured refers to this memory, whatever happens to the layer's attributes.
        self._live: Mapping[Way, torch.Tensor] = {way: tensor_at(model, way) for way in moving.tensors}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._changes: list[tuple[Way, Number]] = []

    def collect(self) -> None:
        """A round has filled the shadow: find what the swap brings along.

        Raises:
            ValueError: something cannot follow; names it.
        """
        problems: list[str] = []
        self._copies, self._changes = [], []
        for way, live in self._live.items():
            try:
                twin = tensor_at(self._shadow, way)
            except LookupError as error:
                problems.append(str(error))
                continue
            if layout_of(twin) != layout_of(live):
                problems.append(
                    f"{name_of(way)!r} is {_words(layout_of(live))} and became {_words(layout_of(twin))}"
                )
            else:
                self._copies.append((live, twin))
        for way in self._moving.numbers:
            problems += self._collect_number(way)
        if problems:
            raise ValueError(f"the model cannot take this version while it serves: {join_reasons(problems)}")

    def swap(self) -> None:
        """Copy, on the current stream, and set the numbers."""
        for live, twin in self._copies:
            live.copy_(twin)
        for way, number in self._changes:
            put(self._model, way, number)

    def _collect_number(self, way: Way) -> list[str]:
        try:
            number, live = follow(self._shadow, way), follow(self._model, way)
        except LookupError:
            return []  # an attribute of the initial load only
        if same(number, live):
            return []
        if self._baked:
            return [
                f"{name_of(way)!r} changed from {live} to {number}, and compiled or captured code contains "
                "the old number; use enforce_eager"
            ]
        try:
            put(self._model, way, live)
        except TypeError as error:
            return [f"{error}; it would change from {live} to {number}"]
        self._changes.append((way, number))
        return []


def _is_renewed(way: Way, first: Observation, second: Observation) -> bool:
    if way in second.numbers:
        return way not in first.numbers or not same(first.numbers[way], second.numbers[way])
    before = (first.tensors | first.buffers).get(way)
    after = (second.tensors | second.buffers).get(way)
    return before is None or after is None or before.is_older(after)


def _holds_addresses(way: Way, live: Observation) -> bool:
    """Whether it is a whole number, or a tensor of such, as large as an address (of packed weights)."""
    content = live.tensors.get(way)
    if content is not None:
        tensor = content.object()
        return tensor is not None and tensor.dtype == torch.int64 and bool((tensor >= _ADDRESS).any())
    number = live.numbers.get(way)
    return isinstance(number, int) and number >= _ADDRESS


def _words(layout: Layout) -> str:
    dtype, shape, stride, device = layout
    return f"{dtype} {list(shape)} {stride} on {device}"
