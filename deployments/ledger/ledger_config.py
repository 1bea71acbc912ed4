"""The ledger's settings: fleet size, deadlines, how a round commits, which adapters are allowed."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from deployments.protocol.engine_state import InFlight
from deployments.protocol.errors import Conflict, InvalidRequest
from deployments.protocol.poll import CommitMode, KvCache


class SizeLimits(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    least: int = Field(default=1, ge=1)
    most: int = Field(default=1, ge=1)
    wanted: int | None = None  # the first target; None: as many as the load needs
    fixed: str | None = "'engine.max_replicas' is not set"  # why the number cannot change

    def check(self, wanted: int | None, room: int | None) -> None:
        """Raises Conflict if the number is fixed, InvalidRequest if it is out of bounds or above `room`."""
        if self.fixed is not None:
            raise Conflict(f"the number of replicas is fixed: {self.fixed}", {"most": self.most})
        if wanted is None:
            return
        if not self.least <= wanted <= self.most:
            raise InvalidRequest(
                f"replicas: expected {self.least} to {self.most} ('engine.min_replicas' and "
                f"'engine.max_replicas'), got {wanted}",
                {"least": self.least, "most": self.most, "actual": wanted},
            )
        if room is not None and wanted > room:
            raise InvalidRequest(
                f"replicas: expected at most {room}, which is what the cluster's GPUs hold, got {wanted}",
                {"room": room, "actual": wanted},
            )


FIXED = SizeLimits()


class AdapterLimits(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keep: int = Field(default=2, ge=1)  # versions of one name
    most: int = Field(default=128, ge=1)  # live versions of all names
    base_model: str = ""  # a name that no adapter can have
    refusal: str | None = None  # why there are no adapters


class ProofAction(StrEnum):
    """What follows when a replica's scores of the proof deviate by more than the bound."""

    WARN = "warn"  # a line in the controller's log
    FENCE = "fence"  # if most of those that scored agree, trainer included; else as `warn`


class ProofConfig(BaseModel):
    """After each commit replicas and trainer score the same short sequences, and the round's report says how
    far apart they are."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    sequences: int = Field(default=0, ge=0, le=256)
    """How many sequences; 0: no proof. 32 are about 700 tokens of prompts for each replica and version."""
    bound: float | None = Field(default=None, gt=0)
    """The largest difference of a log-probability that is accepted. None: differences are reported only."""
    action: ProofAction = ProofAction.WARN
    """`warn`: a line in the controller's log for each replica beyond the bound. `fence`: it is replaced, if
    most of those that scored agree, trainer included."""


class LedgerConfig(BaseModel):
    """How long each step may take, and how a round commits; an operator sets `WeightsConfig`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    commit: CommitMode = CommitMode.TOGETHER
    kv_cache: KvCache = KvCache.RECOMPUTE
    in_flight: InFlight = InFlight.KEEP
    min_replicas: int = Field(default=1, ge=1)
    max_unavailable: int = Field(default=1, ge=1)
    heartbeat_timeout_s: float = Field(default=30.0, gt=0)
    stage_timeout_s: float = Field(default=120.0, gt=0)
    commit_timeout_s: float = Field(default=60.0, gt=0)
    drain_timeout_s: float = Field(default=120.0, gt=0, le=300)
    proof: ProofConfig = ProofConfig()
    lease_s: float = Field(default=60.0, gt=0)
    # Constants; tests make them shorter.
    call_timeout_s: float = Field(default=60.0, gt=0)
    proof_timeout_s: float = Field(default=90.0, gt=0)  # for scores, since the version's first ones

    store_timeout_s: float = Field(default=600.0, gt=0)  # writing a version that only replicas hold
    catch_up_timeout_s: float = Field(default=1800.0, gt=0)  # loading a stored version, beside rounds
    join_timeout_s: float = Field(default=3600.0, gt=0)  # a joiner's version stays in the store for so long
    grace_s: float = Field(default=5.0, ge=0)  # a replica may report its own timeout before it is fenced
