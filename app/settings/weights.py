"""The section `weights`: how an update is transferred, staged and committed."""

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

from app.settings.section import Section
from deployments.ledger.ledger_config import LedgerConfig
from deployments.protocol.engine_state import InFlight
from deployments.protocol.poll import CommitMode, KvCache
from deployments.weights.transports.registry import OWN_WIRE, TRANSPORTS, VLLM_WIRE, Transport


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

    HOST = "host"  # host memory: loaded inside the pause
    # In a shadow of the parameters, filled while generating: the pause is one copy, or on a CPU a swap.
    DEVICE = "device"
    NONE = "none"  # nowhere: vLLM's own engines load inside the pause. Least memory, longest pause


class Wire(StrEnum):
    SLIPSTREAM = OWN_WIRE  # our transports, with a digest for each tensor
    VLLM = VLLM_WIRE  # vLLM's own trainer engines `nccl` and `ipc`, unchanged: TRL, SkyRL and others


class WeightsConfig(Section):
    commit: CommitMode = CommitMode.TOGETHER
    kv_cache: KvCache = KvCache.RECOMPUTE
    in_flight: InFlight = InFlight.KEEP
    min_replicas: PositiveInt = 1
    max_unavailable: PositiveInt = 1  # commit 'rolling'
    heartbeat_timeout_s: PositiveFloat = 30.0
    stage_timeout_s: PositiveFloat = 120.0
    commit_timeout_s: PositiveFloat = 60.0
    # How long running requests may continue before an update with `in_flight: wait`, or `/pause` and `/sleep`
    # with `mode=wait`; new ones wait meanwhile. Longer than the longest completion takes; publishers wait no
    # longer than the upper bound.
    drain_timeout_s: float = Field(default=120.0, gt=0, le=300)
    lease_s: PositiveFloat = 60.0

    transport: TransportName = "shm"
    # None: on a CPU 'device' where that is possible (the engine's log says why not), else 'host'.
    staging: StagingMode | None = None
    # Staging 'none' always uses vLLM's.
    wire: Wire = Wire.SLIPSTREAM
    # A trainer rank holds two chunks on its GPU (ipc, nccl), a replica on another one holds one (ipc) or two
    # (nccl). None: the transport's default.
    chunk_bytes: int | None = Field(default=None, ge=1 << 16, le=4 << 30)
    # The share of a GPU's time that staging may take while requests run. Below 1 it pauses between chunks:
    # decoding stays fast, an update takes longer. None: the transport's default. Not if the replica is idle.
    staging_share: float | None = Field(default=None, gt=0.0, le=1.0)
    # CUDA IPC handles can only arrive pickled; a restricted unpickler reads them.
    allow_pickled_ipc_over_http: bool = False

    @property
    def transport_record(self) -> Transport:
        return TRANSPORTS[self.transport]

    @property
    def effective_chunk_bytes(self) -> int:
        return self.transport_record.chunk_bytes if self.chunk_bytes is None else self.chunk_bytes

    @property
    def effective_staging_share(self) -> float:
        return self.transport_record.staging_share if self.staging_share is None else self.staging_share

    def ledger(self) -> LedgerConfig:
        return LedgerConfig(**self.model_dump(include=set(LedgerConfig.model_fields)))
