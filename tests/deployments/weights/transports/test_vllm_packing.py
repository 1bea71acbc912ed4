"""The receiver cuts vLLM's stream where vLLM's own packer does, whatever the sizes."""

import random

import pytest
import torch
from vllm.distributed.weight_transfer.packed_tensor import PackedChunk, pack_tensors

from deployments.weights.transports.vllm_packing import is_aligned, nccl_pieces, one_piece, received_block
from deployments.weights.wire.chunk_layout import describe

DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.int64)
Tensors = list[tuple[str, torch.Tensor]]


def tensors_of(seed: int) -> Tensors:
    """A few dozen tensors of up to 400 bytes, some of them empty."""
    drawn = random.Random(seed)
    return [
        (f"t{i}", torch.arange(drawn.choice([0, 1, 2, 7, 16, 33, 50])).to(drawn.choice(DTYPES)))
        for i in range(drawn.randrange(1, 40))
    ]


def packed(tensors: Tensors, buffer_bytes: int) -> list[PackedChunk]:
    """What vLLM's own packer makes of them."""
    left, found = iter(tensors), []
    while (chunk := pack_tensors(left, lambda item: item[1], buffer_bytes)) is not None:
        found.append(chunk)
    return found


@pytest.mark.filterwarnings("ignore:Tensor .* has size")
def test_the_pieces_are_those_of_vllms_packer() -> None:
    for seed in range(60):
        check_pieces(seed)


def check_pieces(seed: int) -> None:
    tensors, buffer_bytes = tensors_of(seed), random.Random(seed).choice([1, 64, 200, 399, 400, 5000])
    theirs = packed(tensors, buffer_bytes)
    metadata = describe([(name, tensor.dtype, tensor.shape) for name, tensor in tensors])
    ours = nccl_pieces(**metadata, chunk_bytes=buffer_bytes)
    assert [[entry.name for entry in piece.entries] for piece in ours] == [each.names for each in theirs]
    assert [piece.size_bytes for piece in ours] == [each.packed_tensor.numel() for each in theirs]
    found = [
        (name, tensor)
        for piece, each in zip(ours, theirs, strict=True)
        for name, tensor in received_block(piece, each.packed_tensor).named()
    ]
    for (name, tensor), (expected_name, expected) in zip(found, tensors, strict=True):
        assert name == expected_name and tensor.dtype == expected.dtype and torch.equal(tensor, expected)


def test_memory_that_must_be_moved_to_be_read_is_never_taken_for_memory_of_before() -> None:
    odd = describe([("a", torch.bfloat16, (3,)), ("b", torch.float32, (2,))])
    (piece,) = one_piece(**odd)
    block = torch.zeros(piece.size_bytes, dtype=torch.uint8)
    assert not is_aligned(piece)
    assert received_block(piece, block).memory_key != received_block(piece, block).memory_key
    (even,) = one_piece(**describe([("a", torch.bfloat16, (2,)), ("b", torch.float32, (2,))]))
    assert is_aligned(even)
    assert (
        received_block(even, block).memory_key == received_block(even, block).memory_key == block.data_ptr()
    )


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "a"], "each tensor must be named once"),
        ([["a"], "b"], "lists of names and numbers"),
        (["a"], "one"),
    ],
)
def test_metadata_that_vllm_does_not_send_is_refused(names: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one_piece(names, ["float32"] * 2, [[1], [1]])  # type: ignore[arg-type]
