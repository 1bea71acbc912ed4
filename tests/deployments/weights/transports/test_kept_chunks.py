"""Rounds over one connection of `gloo`, sent as differences. Sender and receivers are the real engines."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from deployments.host.network import address_towards
from deployments.protocol.errors import TransferFailed
from deployments.weights.transports.gloo import _fits
from deployments.weights.transports.kept_chunks import KeptChunks
from deployments.weights.transports.rendezvous import RendezvousInfo
from deployments.weights.wire.chunk_layout import plan_chunks, view
from tests.deployments.weights.transports.transport_contract import (
    CHUNK_BYTES,
    connect,
    digest_of,
    make_fleet,
    stop,
)
from tests.deployments.weights.transports.transport_fleet import (
    Fleet,
    ListSource,
    ProcessReceiver,
    Receiver,
    Rejected,
    Tensors,
    write_checkpoint,
)

GLOO = "gloo"


class Policy:
    """Float32 weights with AdamW, published in bfloat16."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        shapes = {"embed.weight": (301, 128), "norm.weight": (128,), "layer.weight": (384, 128)}
        self.weights = {name: (torch.randn(shape) / 10).requires_grad_() for name, shape in shapes.items()}
        self._optimizer = torch.optim.AdamW(self.weights.values(), lr=1e-6)
        self.source = ListSource(self._tensors(), self.sent())

    def step(self) -> None:
        for weight in self.weights.values():
            weight.grad = torch.randn_like(weight)
        self._optimizer.step()

    def _tensors(self) -> Tensors:
        return [(name, weight.detach()) for name, weight in self.weights.items()]

    def sent(self) -> Tensors:
        return [(name, tensor.bfloat16()) for name, tensor in self._tensors()]

    @property
    def size_bytes(self) -> int:
        """As a round sends it whole."""
        tensors = [(name, tensor.dtype, tensor.shape) for name, tensor in self.sent()]
        return sum(chunk.size_bytes for chunk in plan_chunks(tensors, CHUNK_BYTES))


@pytest.fixture
def policy() -> Policy:
    return Policy()


@pytest.fixture
def checkpoint(policy: Policy, tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, policy.sent())
    return tmp_path


@pytest.fixture
def fleet(checkpoint: Path) -> Iterator[Fleet]:
    made = make_fleet(GLOO, checkpoint)
    yield made
    for receiver in made.receivers:
        stop(receiver)


def arrived(fleet: Fleet, policy: Policy) -> int:
    """How many bytes each receiver got of the policy, which all have bit for bit."""
    states = fleet.verify()
    expected = digest_of(policy.sent())
    assert {state.digest for state in states} == {expected}, states
    assert {receiver.staged() for receiver in fleet.receivers} == {expected}
    (size_bytes,) = {state.size_bytes for state in states}
    return size_bytes


def test_a_round_after_a_step_moves_what_has_changed(fleet: Fleet, policy: Policy) -> None:
    engine = connect(GLOO, fleet, policy.source)
    engine.send_weights()
    assert arrived(fleet, policy) == policy.size_bytes
    for _ in range(3):
        policy.step()
        engine.send_weights()
        assert arrived(fleet, policy) < policy.size_bytes / 15
    for weight in policy.weights.values():
        weight.data *= 2.5
    engine.send_weights()
    assert arrived(fleet, policy) == policy.size_bytes, "most has changed"
    engine.shutdown()


def damage(receiver: Receiver, place: int) -> None:
    """Change a byte of a chunk that a receiver keeps of the last round."""
    receiver.engine.group.kept._blocks[0][place] ^= 1  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "problem"),
    [
        (-1, "^chunk 0 came as the difference from one that this worker does not have: connect again$"),
        (0, "^'embed.weight' was sent with digest "),
    ],
    ids=["another version", "a wrong bit"],
)
def test_a_base_that_is_not_the_publishers_ends_the_round_and_the_next_one_is_whole(
    fleet: Fleet, policy: Policy, place: int, problem: str
) -> None:
    engine = connect(GLOO, fleet, policy.source)
    engine.send_weights()
    damage(fleet.receivers[0], place)
    policy.step()
    with pytest.raises(Rejected, match=problem):
        engine.send_weights()
    engine.shutdown()
    fleet.drop()
    engine = connect(GLOO, fleet, policy.source)
    engine.send_weights()
    assert arrived(fleet, policy) == policy.size_bytes
    engine.shutdown()


def test_a_block_is_overwritten_only_if_nothing_else_refers_to_it() -> None:
    """The store's writer and `staging: host` keep what arrived beyond the next round."""
    (chunk,) = plan_chunks([("weight", torch.int16, (512, 8))], 1 << 20)
    here, there = KeptChunks(), KeptChunks()
    passing: list[torch.Tensor] = []
    block = torch.randint(256, (chunk.size_bytes,), dtype=torch.uint8)

    def arrive(parts: Sequence[torch.Tensor]) -> None:
        for part in parts:
            part.copy_(passing.pop(0))

    def moved() -> torch.Tensor:
        here.send(0, chunk, block, passing.extend)
        received, _ = there.receive(0, chunk, arrive)
        assert torch.equal(received, block)
        return received

    for change in (slice(0, 10), slice(None)):  # a difference, and too much for one
        held = view(chunk.entries[0], moved())
        before, place = held.clone(), held.data_ptr()
        block[change] ^= 1
        assert moved().data_ptr() != place
        assert torch.equal(held, before)
        del held
        place = moved().data_ptr()
        block[change] ^= 1
        assert moved().data_ptr() == place


def test_hosts_keep_chunks_if_all_have_memory_for_those_of_their_members() -> None:
    info = RendezvousInfo(
        master_address=address_towards("127.0.0.1"),
        master_port=1,
        rank_offset=1,
        world_size=4,
        timeout_s=1.0,
        chunk_bytes=CHUNK_BYTES,
        names=["weight"],
        dtype_names=["bfloat16"],
        shapes=[[128, 1000]],
    )
    (size_bytes,) = {chunk.size_bytes for chunk in info.chunks()}
    one, two = 3 * size_bytes, 6 * size_bytes
    assert _fits(info, [("a", one), ("b", two), ("b", two)])
    assert not _fits(info, [("a", one), ("b", two), ("b", two - 1)])
    assert not _fits(info, [("a", one - 1), ("b", two), ("b", two)])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_fifty_rounds_with_kills_between_and_within_leave_what_whole_rounds_would(
    policy: Policy, checkpoint: Path
) -> None:
    """The receivers are processes."""
    fleet = Fleet([ProcessReceiver(GLOO, str(checkpoint), "cpu") for _ in range(2)])
    engine = connect(GLOO, fleet, policy.source)
    sizes = []
    for number in range(50):
        policy.step()
        victim = fleet.receivers[number % 2] if number % 12 in (5, 10) else None
        if victim is not None and number % 12 == 5:
            victim.kill()
        elif victim is not None:
            policy.source.before = lambda index, victim=victim: victim.kill() if index == 1 else None
        if victim is None:
            engine.send_weights()
        else:
            with pytest.raises((Rejected, TransferFailed, OSError, EOFError)):
                engine.send_weights()
            engine.shutdown()
            policy.source.before = None
            fleet.receivers[number % 2] = ProcessReceiver(GLOO, str(checkpoint), "cpu")
            fleet.drop()
            engine = connect(GLOO, fleet, policy.source)
            engine.send_weights()
        sizes.append(arrived(fleet, policy))
    whole = [number for number, size in enumerate(sizes) if size == policy.size_bytes]
    assert whole == [0, 5, 10, 17, 22, 29, 34, 41, 46]
    assert all(size < policy.size_bytes / 15 for number, size in enumerate(sizes) if number not in whole)
    engine.shutdown()
    for receiver in fleet.receivers:
        receiver.kill()
