from collections.abc import Callable

import pytest
import torch

from deployments.weights.staging.base import Tensors
from deployments.weights.staging.load_plan import LoadPlans
from deployments.weights.wire.chunk_layout import Chunk, pack, packed_chunk, plan_chunks
from deployments.weights.wire.digest import digests
from deployments.weights.wire.digest_definition import unsigned

HEADS, WIDTH = 6, 8


class Model:
    """Parameters like vLLM's: two tensors stacked into one, a shard of columns, and padding."""

    def __init__(self) -> None:
        self.stacked = torch.zeros(2 * HEADS, WIDTH)
        self.shard = torch.zeros(HEADS, WIDTH // 2)
        self.padded = torch.full((HEADS + 2, WIDTH), 7.0)

    def load(self, tensors: Tensors) -> None:
        for name, tensor in tensors:
            if name == "q":
                self.stacked.narrow(0, 0, HEADS).copy_(tensor)
            elif name == "k":
                self.stacked.narrow(0, HEADS, HEADS).copy_(tensor.t())
            elif name == "down":
                self.shard.copy_(tensor.narrow(1, WIDTH // 2, WIDTH // 2))
            else:
                self.padded[:HEADS].copy_(tensor)
                self.padded[HEADS:].fill_(0)

    def parameters(self) -> list[torch.Tensor]:
        return [self.stacked, self.shard, self.padded]


def version(seed: int) -> Tensors:
    torch.manual_seed(seed)
    shapes = {"q": (HEADS, WIDTH), "k": (WIDTH, HEADS), "down": (HEADS, WIDTH), "embed": (HEADS, WIDTH)}
    return [(name, torch.randn(shape).bfloat16()) for name, shape in shapes.items()]


def block_of(chunk: Chunk, tensors: Tensors) -> torch.Tensor:
    block = torch.zeros(chunk.size_bytes, dtype=torch.uint8)
    pack(chunk, iter(tensors), block)
    return block


@pytest.fixture
def chunk() -> Chunk:
    (made,) = plan_chunks([(name, tensor.dtype, tensor.shape) for name, tensor in version(0)], 1 << 20)
    return made


def one_round(plans: LoadPlans, chunk: Chunk, seed: int, load: Callable[[Tensors], None]) -> bool:
    """Whether the chunk was loaded by a plan."""
    received = packed_chunk(chunk, block_of(chunk, version(seed)))
    found = plans.replay(received)
    if found is None:
        with plans.record(chunk, received.named()):
            load(received.named())
    else:
        assert unsigned(found.digests) == digests([tensor for _, tensor in version(seed)])
    plans.confirm({chunk})
    return found is not None


def test_from_the_second_round_on_the_plan_repeats_the_loader(chunk: Chunk) -> None:
    plans, planned, loaded = LoadPlans(), Model(), Model()
    replayed = [one_round(plans, chunk, seed, planned.load) for seed in (1, 2, 3)]
    loaded.load(version(3))
    assert replayed == [False, True, True]
    assert all(map(torch.equal, planned.parameters(), loaded.parameters()))


def test_a_plan_that_fills_whole_tensors_restores_the_last_round(chunk: Chunk) -> None:
    def load(tensors: Tensors) -> None:
        for name, tensor in tensors:
            kept[name].copy_(tensor.t())

    kept = {name: torch.zeros_like(tensor.t()) for name, tensor in version(0)}
    plans = LoadPlans()
    assert not plans.can_restore(chunk)
    for seed in (1, 2):
        one_round(plans, chunk, seed, load)
        assert plans.can_restore(chunk)
        restored, sent = torch.zeros(chunk.size_bytes, dtype=torch.uint8), block_of(chunk, version(seed))
        plans.restore(chunk, restored)
        assert torch.equal(restored[: chunk.table_offset], sent[: chunk.table_offset])


@pytest.mark.parametrize("changed", ["a shard", "a cast", "halves"])
def test_a_plan_restores_only_what_it_has_filled(chunk: Chunk, changed: str) -> None:
    def load(tensors: Tensors) -> None:
        for name, tensor in tensors:
            for part in (slice(0, 3), slice(3, None)):
                if name != "k" or changed != "a shard" or part.start == 0:
                    kept[name][part].copy_(tensor[part])

    kept = {name: torch.zeros_like(tensor) for name, tensor in version(0)}
    if changed == "a cast":
        kept["q"] = kept["q"].float()
    plans = LoadPlans()
    one_round(plans, chunk, 1, load)
    assert plans.can_restore(chunk) is (changed == "halves")


def computes(model: Model, tensors: Tensors) -> None:
    model.load([(name, tensor * 2) for name, tensor in tensors])


def reads_a_number(model: Model, tensors: Tensors) -> None:
    model.load(tensors)
    model.padded[0, 0] = tensors[0][1][0, 0].item()


def adds(model: Model, tensors: Tensors) -> None:
    model.load(tensors)
    model.stacked.add_(1)


def copies_from_elsewhere(model: Model, tensors: Tensors) -> None:
    model.load(tensors)
    model.shard.copy_(torch.ones(HEADS, WIDTH // 2))


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (computes, "aten.mul.Tensor computes from the received tensors"),
        (reads_a_number, "aten._local_scalar_dense.default computes from the received tensors"),
        (adds, "aten.add_.Tensor writes something other than a copy of a received tensor"),
        (copies_from_elsewhere, "aten.copy_.default writes something other than a copy of a received tensor"),
    ],
)
def test_a_loader_that_computes_runs_in_every_round(
    chunk: Chunk, load: Callable[[Model, Tensors], None], reason: str
) -> None:
    plans, model, expected = LoadPlans(), Model(), Model()
    replayed = [one_round(plans, chunk, seed, lambda tensors: load(model, tensors)) for seed in (1, 2)]
    load(expected, version(1))
    load(expected, version(2))
    assert replayed == [False, False]
    assert plans.refused == {chunk: reason}
    assert all(map(torch.equal, model.parameters(), expected.parameters()))


def test_a_write_outside_torch_is_found_by_digest(chunk: Chunk) -> None:
    plans, model = LoadPlans(), Model()
    received = packed_chunk(chunk, block_of(chunk, version(1)))
    with plans.record(chunk, received.named()):
        model.load(received.named())
    model.shard.numpy()[0, 0] += 1.0  # as a kernel outside torch would do it
    plans.confirm({chunk})
    assert plans.replay(received) is None
    assert plans.refused[chunk] == "a loaded tensor was changed after it had been copied"


def test_a_round_that_was_dropped_leaves_no_plan(chunk: Chunk) -> None:
    plans, model = LoadPlans(), Model()
    received = packed_chunk(chunk, block_of(chunk, version(1)))
    with plans.record(chunk, received.named()):
        model.load(received.named())
    plans.discard()
    plans.confirm({chunk})
    assert len(plans) == 0


def test_a_plan_that_left_parameters_unfilled_is_not_used_again(chunk: Chunk) -> None:
    plans, model = LoadPlans(), Model()
    one_round(plans, chunk, 1, model.load)
    plans.refuse(set())
    assert len(plans) == 1
    plans.refuse({chunk})
    assert not one_round(plans, chunk, 2, model.load)
    assert not one_round(plans, chunk, 3, model.load)


def test_a_plan_is_prepared_again_where_its_memory_was_released(chunk: Chunk) -> None:
    plans, model = LoadPlans(), Model()
    one_round(plans, chunk, 1, model.load)
    plans.release()
    assert one_round(plans, chunk, 2, model.load)
