"""The section `weights`: how an update is transferred, staged and committed."""

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

from app.settings.section import Section
from deployments.ledger.ledger_config import LedgerConfig, ProofConfig
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

    HOST = "host"  # loaded inside the pause
    # A shadow of the parameters, filled while generating; the pause is one copy, or a swap on a CPU.
    DEVICE = "device"
    NONE = "none"  # vLLM's own engines load inside the pause: least memory, longest pause


class Wire(StrEnum):
    SLIPSTREAM = OWN_WIRE  # our transports, with a digest per tensor
    VLLM = VLLM_WIRE  # vLLM's trainer engines `nccl` and `ipc`: TRL, SkyRL and others


class WeightsConfig(Section):
    """How an update is transferred, staged and committed."""

    commit: CommitMode = CommitMode.TOGETHER
    """`together`: no two replicas ever serve different versions. `rolling`: `max_unavailable` swap at a
    time."""
    kv_cache: KvCache = KvCache.RECOMPUTE
    """What running requests do at a commit. `recompute`: they compute their cache again with the new weights.
    `keep`: they keep it, and their next tokens attend to keys and values of the version before. The prefix
    cache is reset either way."""
    in_flight: InFlight = InFlight.KEEP
    """Running requests at a commit. `keep`: they go on with the new weights. `wait`: the round waits for
    their end. `abort`: they end with what they have."""
    min_replicas: PositiveInt = 1
    """A round is aborted if fewer take part."""
    max_unavailable: PositiveInt = 1
    """With commit `rolling`: how many replicas swap at a time."""
    heartbeat_timeout_s: PositiveFloat = 30.0
    """A replica that has not polled for so long is lost; a publisher that was silent for twice as long loses
    its lease, and its round is aborted."""
    stage_timeout_s: PositiveFloat = 120.0
    """How long a replica may take to receive and verify a version; then it is fenced."""
    commit_timeout_s: PositiveFloat = 60.0
    """How long a replica may take to swap; then it is fenced."""
    drain_timeout_s: float = Field(default=120.0, gt=0, le=300)
    """How long running requests may continue before an update with `in_flight: wait`, or `/pause` and
    `/sleep` with `mode=wait`; new ones wait meanwhile. Longer than the longest completion takes."""

    proof: ProofConfig = ProofConfig()
    """Proof of policy after each commit."""

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

    def ledger(self) -> LedgerConfig:
        settings = self.model_dump(include=set(LedgerConfig.model_fields))
        # A lease must not expire before the membership of a replica does.
        return LedgerConfig(**settings, lease_s=2 * self.heartbeat_timeout_s)
