"""The base class of all sections of the configuration, and the devices that several of them name."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of settings that cannot change and has no unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Device(StrEnum):
    """The kind of device that engines and trainer run on."""

    CPU = "cpu"
    CUDA = "cuda"


class Placement(StrEnum):
    """Whether the trainer shares the replicas' GPUs."""

    SEPARATE = "separate"  # the trainer has its own devices
    COLOCATED = "colocated"  # one trainer rank on every GPU of the replicas
