"""What the trainer deployment answers to its callers, beside `RoundReport`: the routes send it as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass

from deployments.protocol.publishing import RoundReport

StepMetrics = Mapping[
    str, float | int | bool | None
]  # of one optimizer step, by name; None: not a finite number


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint directory that `save` wrote on the trainer's host."""

    path: str
    step: int  # optimizer steps done
    save_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReport:
    """An adapter that `publish` made live on every replica."""

    name: str  # requests name it so, or as NAME@VERSION
    version: int  # of this name
    label: str | None
    step: int  # optimizer steps that it has had
    base_version: int  # of the weights that it was trained on
    digest: str  # of its files
    size_bytes: int
    write_s: float  # until its files were written, beside the transfer
    duration_s: float  # of the whole call
    transfer_s: float | None = None  # to the replicas' memory; None: they read the fleet's copy


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    """What the trainer is doing, and what it has done."""

    step: int  # optimizer steps done
    version: int  # the newest that this trainer published or resumed from; the base of an adapter
    doing: str | None  # step | publish | rollback | save
    doing_s: float
    strategy: str
    world_size: int  # ranks of the trainer
    transport: str
    parameters: int  # numbers in the model, over all ranks; of an adapter alone
    last_step: StepMetrics  # empty before the first step
    last_round: RoundReport | None
    stored_version: int | None  # the newest that this trainer wrote to the store
    store_problem: str | None  # why the version written last is not in the store
    untrained: tuple[str, ...] = ()  # tensors of the checkpoint that replicas keep as loaded, in words
    adapter: str | None = None  # the name of the adapter that it trains; None: it trains all weights
    adapter_version: int = 0  # the newest that it published or resumed beside; 0: none
    last_adapter: AdapterReport | None = None
