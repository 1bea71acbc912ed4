"""What a trainer worker reports to the trainer deployment, and the deployment to its callers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pydantic import JsonValue

from deployments.protocol import RoundReport


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTrainer:
    """What a worker has loaded when it is ready for its first step."""

    version: int  # of the weights; 0 for the model that the trainer was configured with
    step: int  # optimizer steps done
    parameters: int  # numbers in the model, over all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint directory that `save` wrote on the trainer's host."""

    path: str
    step: int  # optimizer steps done
    save_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatus:
    """What became of the versions that this trainer wrote to the store."""

    stored_version: int | None  # the newest that is complete
    store_problem: str | None  # why the version written last is not in the store


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    """What the trainer is doing, and what it has done; the body of `/train/status`."""

    step: int  # optimizer steps done
    version: int  # the newest that this trainer published or resumed from
    doing: str | None  # step | publish | rollback | save
    doing_s: float
    strategy: str
    world_size: int  # ranks of the trainer
    transport: str
    parameters: int  # numbers in the model, over all ranks
    last_step: Mapping[str, float | int | bool]  # metrics; empty before the first step
    last_round: RoundReport | None
    stored_version: int | None  # see `StoreStatus`
    store_problem: str | None

    def body(self) -> dict[str, JsonValue]:
        """The status as `/train/status` sends it."""
        return asdict(self) | {"last_round": {} if self.last_round is None else asdict(self.last_round)}
