"""What a trainer is started with."""

from dataclasses import dataclass, field
from enum import StrEnum

from trainers.learner import LearnerConfig

PUBLISHER = "trainer"  # its name at the fleet


class Strategy(StrEnum):
    SINGLE = "single"
    FSDP2 = "fsdp2"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """Attributes:
    model: a checkpoint directory; what the trainer starts from while the store is empty.
    store_dir: the store of committed versions, the same that the controller reads.
    keep: how many versions stay in it.
    transport, chunk_bytes: how weights travel, see deployments.weights.
    native: by vLLM's own engines of that name, which load inside a pause (`staging: none`).
    wire_dtype: floating-point weights are cast to it when published and stored; None leaves them.
    optimizer_state_every: write the optimizer's state with every n-th stored version; 0 never.
        It is twice the size of the weights in float32; without it a restarted trainer begins
        with empty moments.
    cpu_threads: of each worker; 0 means all cores.
    """

    model: str
    store_dir: str
    transport: str
    chunk_bytes: int = 64 << 20
    native: bool = False
    keep: int = 3
    strategy: Strategy = Strategy.SINGLE
    world_size: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    wire_dtype: str | None = None
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    optimizer_state_every: int = 10
    seed: int = 0
    gpus_per_rank: float = 1.0  # where device is cuda
    cpu_threads: int = 0
    start_timeout_s: float = 600.0
    step_timeout_s: float = 600.0
    publish_timeout_s: float = 900.0

    def __post_init__(self) -> None:
        if self.strategy == Strategy.SINGLE and self.world_size != 1:
            raise ValueError(f"strategy 'single' needs world_size 1, got {self.world_size}")
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")
