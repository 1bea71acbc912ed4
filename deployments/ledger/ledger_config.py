"""The ledger's settings: fleet size, deadlines, how a round commits, which adapters are allowed."""

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
    lease_s: float = Field(default=60.0, gt=0)
    # Constants; tests make them shorter.
    call_timeout_s: float = Field(default=60.0, gt=0)

    store_timeout_s: float = Field(default=600.0, gt=0)  # writing a version that only replicas hold
    catch_up_timeout_s: float = Field(default=1800.0, gt=0)  # loading a stored version, beside rounds
    join_timeout_s: float = Field(default=3600.0, gt=0)  # a joiner's version stays in the store for so long
    grace_s: float = Field(default=5.0, ge=0)  # a replica may report its own timeout before it is fenced
