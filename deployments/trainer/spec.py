"""What a trainer is started with."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deployments.protocol.poll import InitialWeights
from deployments.weights.transports.registry import KeepPublished
from trainers.settings import TrainerConfig

LABELS_KEPT = 100  # steps
PUBLISHER = "trainer"


def state_directory(store_dir: str | Path) -> Path:
    return Path(store_dir) / "trainer"


def adapter_directory(store_dir: str | Path) -> Path:
    return state_directory(store_dir) / "adapters"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """A trainer's settings, and what the rest of the configuration determines.

    Attributes:
        native: vLLM's own engine of the transport sends, inside a pause (`staging: none`).
        proof_sequences: scored after each publish, as replicas do; 0: none.
        store_keep: versions kept in this host's own store; None: hosts share it, and the controller removes
            old ones.
    """

    config: TrainerConfig
    model: str
    device: str
    store_dir: str
    transport: str
    chunk_bytes: int
    native: bool
    keep_published: KeepPublished | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    publish_timeout_s: float = 900.0
    proof_sequences: int = 0
    store_keep: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTrainer:
    version: int  # loaded weights; 0: the configured model
    missed: str | None = None  # why the fleet serves others, and what to do; None: it does not
    step: int
    labels: Sequence[str] = ()  # newest steps'
    parameters: int  # trained, over all ranks
    untrained: Sequence[str] = ()  # what the model lacks of the checkpoint, in words
    adapter_version: int = 0  # the newest live one
    fleet_id: str = ""
    initial: InitialWeights | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatus:
    stored_version: int | None
    store_problem: str | None  # why the last written version is not in the store
