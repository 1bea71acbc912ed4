"""The section `weights`: how an update is transferred, staged and committed."""

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from deployments.protocol.ledger_config import LedgerConfig, RoundConfig
from deployments.weights.transports.registry import (
    OWN_WIRE,
    TRANSPORTS,
    VLLM_WIRE,
    KeepPublished,
    Transport,
)


def quoted(names: list[str]) -> str:
    *others, last = [repr(name) for name in names]
    return f"{', '.join(others)} or {last}" if others else last


def _registered(name: str) -> str:
    if name not in TRANSPORTS:
        raise PydanticCustomError("transport", quoted(list(TRANSPORTS)))
    return name


TransportName = Annotated[str, AfterValidator(_registered)]


class StagingMode(StrEnum):
    """Where received tensors are held until the commit."""

    HOST = "host"  # loaded inside the pause
    # A shadow of the parameters, filled during generation; the pause is one copy, or a swap on a CPU.
    DEVICE = "device"
    NONE = "none"  # vLLM's own engines load inside the pause: least memory, longest pause


class Wire(StrEnum):
    SLIPSTREAM = OWN_WIRE  # our transports, with a digest per tensor
    VLLM = VLLM_WIRE  # vLLM's trainer engines `nccl` and `ipc`: TRL, SkyRL and others


class WeightsConfig(RoundConfig):
    """How an update is transferred, staged and committed."""

    transport: TransportName = "shm"
    """How bytes move. `shm`: CPUs of one host. `gloo`: CPUs of several. `ipc`: GPUs of one host. `nccl`: GPUs
    of any, each rank on one of its own."""
    staging: StagingMode | None = None
    """Where a version waits for its commit. `device`: a second copy of the weights beside the live ones; the
    pause is one copy, on a CPU a swap. `host`: host memory, loaded inside the pause. `none`: vLLM's own
    engines load inside the pause. None: on a CPU `device` where that is possible (the engine's log says why
    not), else `host`."""
    wire: Wire = Wire.SLIPSTREAM
    """What a publisher sends. `slipstream`: our transports, with a digest for each tensor. `vllm`: what
    vLLM's own trainer engines `nccl` and `ipc` send, as of TRL and SkyRL. Staging `none` always uses
    vLLM's."""
    chunk_bytes: int | None = Field(default=None, ge=1 << 16, le=4 << 30)
    """Bytes of a chunk. A trainer rank holds two on its GPU (ipc, nccl), a replica on another GPU one (ipc)
    or two (nccl). None: the transport's default."""
    staging_share: float | None = Field(default=None, gt=0.0, le=1.0)
    """The share of a GPU's time that staging may take while requests run. Below 1 it pauses between chunks:
    decoding stays fast, an update takes longer. None: the transport's default."""
    keep_published: KeepPublished | None = None
    """Over `nccl`, with staging `device`: where the trainer keeps the version that it last published, to send
    only what has changed. `device`: a copy of the weights on its GPU. `host`: page-locked host memory, which
    passes the bus in each round: for links slower than that. None: rounds are whole."""
    allow_pickled_ipc_over_http: bool = False
    """Accept vLLM's CUDA IPC handles over HTTP. They can only arrive pickled; a restricted unpickler reads
    them."""

    @property
    def transport_record(self) -> Transport:
        return TRANSPORTS[self.transport]

    @property
    def effective_chunk_bytes(self) -> int:
        return self.transport_record.chunk_bytes if self.chunk_bytes is None else self.chunk_bytes

    @property
    def effective_staging_share(self) -> float:
        return self.transport_record.staging_share if self.staging_share is None else self.staging_share

    def ledger(self, **store: bool) -> LedgerConfig:
        settings = self.model_dump(include=set(RoundConfig.model_fields))
        # A lease must not expire before a replica's membership does.
        return LedgerConfig(**settings, lease_s=2 * self.heartbeat_timeout_s, **store)
