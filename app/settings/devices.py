"""Which devices the fleet runs on, and whether replicas and trainer share them."""

from enum import StrEnum


class Device(StrEnum):
    """The kind of device that engines and trainer run on."""

    CPU = "cpu"
    CUDA = "cuda"


class Placement(StrEnum):
    """Whether the trainer shares the replicas' GPUs."""

    SEPARATE = "separate"  # the trainer has its own devices
    COLOCATED = "colocated"  # one trainer rank on every GPU of the replicas
