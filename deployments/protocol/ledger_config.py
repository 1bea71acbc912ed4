from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from deployments.protocol.engine_state import InFlight
from deployments.protocol.errors import Conflict, InvalidRequest
from deployments.protocol.poll import CommitMode, KvCache


class SizeLimits(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    least: int = Field(default=1, ge=1)
    most: int = Field(default=1, ge=1)
    wanted: int | None = None  # the first target; None: as many as the load needs
    fixed: str | None = "'engine.max_replicas' is not set"

    def check(self, wanted: int | None) -> None:
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


FIXED = SizeLimits()


class AdapterLimits(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keep: int = Field(default=2, ge=1)
    most: int = Field(default=128, ge=1)  # live versions of all names
    base_model: str = ""
    refusal: str | None = None


class ProofAction(StrEnum):
    WARN = "warn"
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


class RoundConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    commit: CommitMode = CommitMode.TOGETHER
    """`together`: no two replicas ever serve different versions. `rolling`: `max_unavailable` swap at a
    time."""
    kv_cache: KvCache = KvCache.RECOMPUTE
    """What running requests do at a commit. `recompute`: they compute their cache again with the new weights.
    `keep`: they keep it, and their next tokens attend to keys and values of the version before. The prefix
    cache is reset either way."""
    in_flight: InFlight = InFlight.KEEP
    """Running requests at a commit. `keep`: they continue with the new weights. `wait`: the round waits for
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
    drain_timeout_s: float = Field(default=120.0, gt=0, le=300)
    """How long running requests may continue before an update with `in_flight: wait`, or `/pause` and
    `/sleep` with `mode=wait`; new ones wait meanwhile. Longer than the longest completion takes."""

    proof: ProofConfig = ProofConfig()
    """Proof of policy after each commit."""


class LedgerConfig(RoundConfig):
    """An operator's `RoundConfig`, and what follows from it or is constant."""

    lease_s: float = Field(default=60.0, gt=0)
    shared_store: bool = True  # False: each host has a store of its own
    outside_versions: bool = True  # replicas write versions whose publisher does not
    # Constants; tests make them shorter.
    commit_timeout_s: float = Field(default=60.0, gt=0)  # staging `host` loads during the commit
    call_timeout_s: float = Field(default=60.0, gt=0)
    proof_timeout_s: float = Field(default=90.0, gt=0)  # waits for scores since the version's first ones

    catch_up_timeout_s: float = Field(default=1800.0, gt=0)  # loading a stored version, beside rounds
    grace_s: float = Field(default=5.0, ge=0)  # a replica may report its own timeout before it is fenced
