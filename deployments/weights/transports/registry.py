"""One record per transport. Settings read them, so only the standard library is imported here.

To connect a trainer, over any transport and over vLLM's own engines:

    register()  # deployments.vllm_plugin
    facts = TrainerFacts(rank=rank, workers=workers, master_address=own_address(), ...)
    info = trainer_init_info(backend(transport, staging), facts)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import TrainerInitInfo

DEFAULT_TIMEOUT_S = 60.0  # limits every wait for a peer
OWN_WIRE, VLLM_WIRE = "slipstream", "vllm"  # the format that a publisher sends
PACKAGE = "deployments.weights.transports"


class SameGpu(StrEnum):
    """Whether a trainer rank and its worker may share a GPU."""

    NO_GPU = "no_gpu"
    POSSIBLE = "possible"  # or on two GPUs of one host; vLLM's own engine: only on the same one
    IMPOSSIBLE = "impossible"


class KeepPublished(StrEnum):
    """Where a publisher over `nccl` keeps its last round, to send differences from it."""

    DEVICE = "device"  # a copy of the weights on its GPU
    HOST = "host"  # page-locked; each round moves it to the GPU and back


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    name: str  # also the module's and, capitalized, the prefix of its classes
    device: Literal["cpu", "cuda"]
    native: bool = False  # vLLM has an engine of this name (`staging: none`, `wire: vllm`)
    same_gpu: SameGpu = SameGpu.NO_GPU
    rendezvous: bool = False  # all members form one group, which a lost member breaks
    chunk_bytes: int = 64 << 20  # each chunk interrupts decoding on a GPU: use large ones
    # Pauses between chunks cost fewer tokens in all, and slow decoding by about a tenth (RESULTS.md).
    staging_share: float = 1.0

    @property
    def backend(self) -> str:
        """As in vLLM's registry, where its own engines keep theirs."""
        return f"slipstream_{self.name}" if self.native else self.name

    @property
    def module(self) -> str:
        return f"{PACKAGE}.{self.name}"

    @property
    def staged_backend(self) -> str:
        """`vllm_<name>`, the receiver for vLLM's own trainer engine."""
        return f"staged_{self.name}"


_ALL = (
    Transport(name="shm", device="cpu"),
    Transport(name="gloo", device="cpu", rendezvous=True, chunk_bytes=32 << 20),  # one passes beside the next
    Transport(
        name="ipc",
        device="cuda",
        native=True,
        same_gpu=SameGpu.POSSIBLE,
        chunk_bytes=1 << 30,
        staging_share=0.1,
    ),
    Transport(
        name="nccl",
        device="cuda",
        native=True,
        same_gpu=SameGpu.IMPOSSIBLE,
        rendezvous=True,
        chunk_bytes=512 << 20,
        staging_share=0.25,
    ),
)

TRANSPORTS: Mapping[str, Transport] = MappingProxyType({transport.name: transport for transport in _ALL})
_BY_BACKEND = {transport.backend: transport for transport in _ALL}
_NATIVE = tuple(transport.name for transport in _ALL if transport.native)
BACKENDS = (*_BY_BACKEND, *_NATIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    rank: int  # 0 sends
    workers: int  # receivers on all replicas
    master_address: str  # rank 0's host, as replicas reach it
    master_port: int
    chunk_bytes: int | None = None  # None: the transport's or vLLM's default
    timeout_s: float = DEFAULT_TIMEOUT_S  # vLLM's own engines have no deadlines
    largest_tensor_bytes: int = 0
    keep_published: KeepPublished | None = None  # None: rounds over `nccl` are whole

    @property
    def world_size(self) -> int:
        return 1 + self.workers


def backend(transport: str, staging: str, wire: str = OWN_WIRE) -> str:
    """The configured receiver's name in vLLM: ours, with staging "none" vLLM's own, with `VLLM_WIRE` one that
    stages what vLLM's trainer engine sends. Raises ValueError."""
    found = TRANSPORTS.get(transport)
    if found is None:
        raise ValueError(f"transport must be one of {sorted(TRANSPORTS)}, got {transport!r}")
    if staging != "none" and wire == OWN_WIRE:
        return found.backend
    if not found.native:
        setting = "staging 'none'" if staging == "none" else "wire 'vllm'"
        raise ValueError(f"{setting} needs a transport of {sorted(_NATIVE)}, got {transport!r}")
    return found.name if staging == "none" else found.staged_backend


def trainer_init_info(backend: str, facts: TrainerFacts) -> TrainerInitInfo:
    transport = _BY_BACKEND.get(backend)
    if transport is not None:
        if facts.chunk_bytes is None:
            facts = replace(facts, chunk_bytes=transport.chunk_bytes)
        kind = getattr(import_module(transport.module), f"{transport.name.capitalize()}TrainerInitInfo")
        return kind(**{field.name: getattr(facts, field.name) for field in fields(kind)})
    if backend in _NATIVE:
        return import_module(f"{PACKAGE}.weight_sender").native_init_info(backend, facts)
    raise ValueError(f"backend must be one of {sorted(BACKENDS)}, got {backend!r}")
