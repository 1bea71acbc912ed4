"""Rounds over one connection, sent as differences. Sender and receivers are the real engines.

`gloo` keeps chunks at both ends, `nccl` at the publisher: there the receivers' staging has the last round. So
it is with `chain`, which moves bytes as `gloo` and needs no GPU.
"""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deployments.host.network import address_towards
from deployments.protocol.errors import TransferFailed
from deployments.trainer.weight_publisher import PublishSource
from deployments.weights.store.checkpoint_files import parts_of, stated
from deployments.weights.transports.broadcast import BUFFERS, Check
from deployments.weights.transports.gloo import (
    GlooGroup,
    GlooTrainerInitInfo,
    GlooTrainerWeightTransferEngine,
    GlooWeightTransferEngine,
    _fits,
)
from deployments.weights.transports.kept_chunks import KeptChunks
from deployments.weights.transports.registry import KeepPublished
from deployments.weights.transports.rendezvous import RendezvousInfo
from deployments.weights.wire.chunk_layout import plan_chunks, view
from tests.deployments.weights.transports.transport_contract import (
    CHUNK_BYTES,
    PATIENCE_S,
    connect_with,
    device_of,
    digest_of,
    init_info,
    kill,
    make_fleet,
    stop,
)
from tests.deployments.weights.transports.transport_fleet import (
    Fleet,
    LastRound,
    ListSource,
    ProcessReceiver,
    Receiver,
    Rejected,
    Tensors,
    worker_config,
    write_checkpoint,
)
from tests.tiny_models import save_tiny_family
from tests.trainers.learning import ANSWERS, on_policy, with_changes
from trainers.learner import Learner
from trainers.settings import OptimizerConfig
from trainers.sources import ParameterSource
from trainers.trained_policy import TrainedPolicy

GLOO, NCCL = "gloo", "nccl"
CHAIN, PAGED = "chain", "nccl, kept in host memory"
KEEP = {NCCL: KeepPublished.DEVICE, PAGED: KeepPublished.HOST}
on_gpus = [pytest.param(name, marks=pytest.mark.gpu) for name in KEEP]
every_way = pytest.mark.parametrize("way", [GLOO, CHAIN, *on_gpus])


class Chain(GlooGroup):
    """A group in which only the publisher keeps chunks, and broadcasts are queued ahead."""

    is_async = True
    votes: dict[int, "Votes"]  # by port; all members are threads of this process

    def __init__(self, info: RendezvousInfo, rank: int, check: Check) -> None:
        super().__init__(info, rank, check)
        self.kept = KeptChunks() if rank == 0 else None
        self._votes = self.votes.setdefault(info.master_port, Votes(info.world_size))

    def reserve(self, size_bytes: int) -> None:
        if not self._blocks:
            self._blocks = {i: torch.empty(size_bytes, dtype=torch.uint8) for i in range(BUFFERS)}

    def buffer(self, index: int, size_bytes: int) -> torch.Tensor:
        return self._blocks[index % BUFFERS][:size_bytes]

    def finish(self) -> None:
        pass

    def agree(self, ready: bool, check: Check = lambda: None) -> bool:
        return self._votes.agree(ready)


class Votes:
    def __init__(self, members: int) -> None:
        self._given: list[bool] = []
        self._agreed = False
        self._all = threading.Barrier(members, self._count, PATIENCE_S)

    def agree(self, ready: bool) -> bool:
        self._given.append(ready)
        self._all.wait()
        return self._agreed

    def _count(self) -> None:
        self._agreed, self._given = all(self._given), []


class ChainReceiver(GlooWeightTransferEngine):
    make_group = Chain


class ChainSender(GlooTrainerWeightTransferEngine):
    make_group = Chain

    def keeps(self, init_info: GlooTrainerInitInfo) -> bool:
        return True


def chain_receiver(checkpoint: Path) -> Receiver:
    receiver = Receiver(GLOO, str(checkpoint), "cpu")
    config: Any = worker_config(str(checkpoint))
    parts: Any = SimpleNamespace()
    receiver.engine = ChainReceiver(parts, config, torch.device("cpu"), torch.nn.Module())
    receiver.engine.staging = LastRound()
    return receiver


def fleet_of(way: str, checkpoint: Path) -> Fleet:
    if way == CHAIN:
        return Fleet([chain_receiver(checkpoint) for _ in range(2)])
    return make_fleet(NCCL if way in KEEP else GLOO, checkpoint)


def connect(way: str, fleet: Fleet, source: ListSource) -> Any:
    info = init_info(NCCL if way in KEEP else GLOO, len(fleet.receivers), keep=KEEP.get(way))
    if way != CHAIN:
        return connect_with(info, fleet, source)
    assert isinstance(info, GlooTrainerInitInfo)
    Chain.votes = {}
    return ChainSender.trainer_init(info, client=fleet, source=source)


class Policy:
    """Float32 weights with AdamW, published in bfloat16. A bias is not trained."""

    def __init__(self, device: str = "cpu") -> None:
        torch.manual_seed(0)
        shapes = {
            "embed.weight": (301, 128),
            "norm.weight": (128,),
            "norm.bias": (128,),
            "layer.weight": (384, 128),
            "head.weight": (301, 128),
        }
        self.weights = {
            name: (torch.randn(shape) / 10).to(device).requires_grad_() for name, shape in shapes.items()
        }
        trained = [weight for name, weight in self.weights.items() if name != "norm.bias"]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-6)
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
def way() -> str:
    return GLOO


@pytest.fixture
def policy(way: str) -> Policy:
    return Policy(device_of(NCCL if way in KEEP else GLOO))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, Policy().sent())
    return directory


@pytest.fixture
def fleet(way: str, checkpoint: Path) -> Iterator[Fleet]:
    made = fleet_of(way, checkpoint)
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


@every_way
def test_a_round_after_a_step_moves_what_has_changed(way: str, fleet: Fleet, policy: Policy) -> None:
    engine = connect(way, fleet, policy.source)
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
    policy.step()
    policy.weights["layer.weight"].data *= 2.5
    engine.send_weights()
    assert 0.3 < arrived(fleet, policy) / policy.size_bytes < 0.6, "most of one chunk"
    engine.shutdown()


@every_way
def test_after_an_aborted_round_the_next_one_is_whole(way: str, fleet: Fleet, policy: Policy) -> None:
    def fail(index: int) -> None:
        if index == 2:
            raise OSError("out of disk")

    engine = connect(way, fleet, policy.source)
    engine.send_weights()
    policy.step()
    policy.source.before = fail
    with pytest.raises(OSError, match=r"^out of disk$"):
        engine.send_weights()
    engine.shutdown()
    fleet.drop()
    policy.source.before = None
    engine = connect(way, fleet, policy.source)
    for expected in (policy.size_bytes, policy.size_bytes / 15):
        engine.send_weights()
        assert arrived(fleet, policy) <= expected
        policy.step()
    engine.shutdown()


@pytest.mark.parametrize("way", [CHAIN, *on_gpus])
def test_a_worker_that_has_not_staged_the_last_round_gets_a_whole_one(
    way: str, fleet: Fleet, policy: Policy
) -> None:
    """It has loaded a directory since, or slept."""
    engine = connect(way, fleet, policy.source)
    engine.send_weights()
    policy.step()
    fleet.receivers[-1].damage("embed.weight")
    engine.send_weights()
    assert arrived(fleet, policy) == policy.size_bytes
    policy.step()
    engine.send_weights()
    assert arrived(fleet, policy) < policy.size_bytes / 15
    fleet.receivers[-1].damage("layer.weight")  # in another chunk than is compared before
    policy.step()
    with pytest.raises(Rejected, match=r"^'layer\.weight' was sent with digest "):
        engine.send_weights()
    engine.shutdown()
    fleet.drop()
    engine = connect(way, fleet, policy.source)
    engine.send_weights()
    assert arrived(fleet, policy) == policy.size_bytes
    engine.shutdown()


@pytest.mark.parametrize("way", [CHAIN, *on_gpus])
def test_the_round_after_a_published_directory_is_whole(
    way: str, fleet: Fleet, policy: Policy, checkpoint: Path
) -> None:
    """It differs from the last round only in chunks that are not compared before."""
    engine = connect(way, fleet, policy.source)
    with torch.no_grad():
        policy.weights["layer.weight"] += 1
    engine.send_weights()
    (part,) = parts_of(checkpoint, [checkpoint / "model.safetensors"], part_bytes=1 << 30)
    for receiver in fleet.receivers:
        receiver.start()
        receiver.read_part(stated(part))
    assert len({state.digest for state in fleet.verify()}) == 1
    policy.step()
    engine.send_weights()
    assert arrived(fleet, policy) == policy.size_bytes
    engine.shutdown()


@pytest.mark.slow
def test_a_vision_tower_that_does_not_learn_travels_once_for_a_connection(tmp_path: Path) -> None:
    """Each version is complete: all receivers check the digests of all tensors."""
    checkpoint = save_tiny_family(tmp_path / "model", "qwen3_vl")
    policy = TrainedPolicy.load(checkpoint)
    tower = policy.model.get_encoder("image")
    source = PublishSource(ParameterSource(policy.model), keep_copy=False)
    fleet = make_fleet(GLOO, checkpoint, count=1)
    engine = connect(GLOO, fleet, source)

    def size_of_round() -> int:
        engine.send_weights()
        (state,) = fleet.verify()
        assert state.digest == digest_of([*ParameterSource(policy.model)])
        return state.size_bytes

    whole = size_of_round()
    sees = sum(parameter.nbytes for parameter in tower.parameters())
    learned = with_changes(optimizer=OptimizerConfig(learning_rate=1e-2))
    Learner(policy, learned).step(on_policy(policy, ANSWERS))
    assert 0.8 * (whole - sees) < size_of_round() < 1.05 * (whole - sees)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(torch.randn_like(parameter))
    assert 0.95 * sees < size_of_round() < 1.05 * sees
    engine.shutdown()
    stop(fleet.receivers[0])


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
@pytest.mark.parametrize("way", [GLOO, *on_gpus[:1]])
def test_fifty_rounds_with_kills_between_and_within_leave_what_whole_rounds_would(
    way: str, policy: Policy, checkpoint: Path
) -> None:
    """The receivers are processes."""
    if way == GLOO:
        fleet = Fleet([ProcessReceiver(GLOO, str(checkpoint), "cpu") for _ in range(2)])
    else:
        fleet = fleet_of(way, checkpoint)
    engine = connect(way, fleet, policy.source)
    sizes = []
    for number in range(50):
        policy.step()
        place = number % len(fleet.receivers)
        victim = fleet.receivers[place] if number % 12 in (5, 10) else None
        if victim is not None and number % 12 == 5:
            kill(victim)
        elif victim is not None:
            policy.source.before = lambda index, victim=victim: kill(victim) if index == 1 else None
        if victim is None:
            engine.send_weights()
        else:
            with pytest.raises((Rejected, TransferFailed, OSError, EOFError)):
                engine.send_weights()
            engine.shutdown()
            policy.source.before = None
            if way == GLOO:
                fleet.receivers[place] = ProcessReceiver(GLOO, str(checkpoint), "cpu")
            else:
                fleet = fleet_of(way, checkpoint)
            fleet.drop()
            engine = connect(way, fleet, policy.source)
            engine.send_weights()
        sizes.append(arrived(fleet, policy))
    whole = [number for number, size in enumerate(sizes) if size == policy.size_bytes]
    assert whole == [0, 5, 10, 17, 22, 29, 34, 41, 46]
    assert all(size < policy.size_bytes / 15 for number, size in enumerate(sizes) if number not in whole)
    engine.shutdown()
    for receiver in fleet.receivers:
        kill(receiver)
