"""What a worker reports to the trainer deployment, beside the answers in `deployments.trainer_reports`."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTrainer:
    """What a worker has loaded when it is ready for its first step."""

    version: int  # of the weights; 0 for the model that the trainer was configured with
    step: int  # optimizer steps done
    parameters: int  # numbers in the model, over all ranks; of an adapter alone
    untrained: Sequence[str] = ()  # what the checkpoint has and the model lacks, in words
    adapter_version: int = 0  # the newest live one of the adapter that it trains


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatus:
    """What became of the versions that this trainer wrote to the store."""

    stored_version: int | None  # the newest that is complete
    store_problem: str | None  # why the version written last is not in the store
