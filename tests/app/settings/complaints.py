"""The message about a wrong configuration, and valid configurations to start from."""

from typing import Any

import pytest

from app.settings.config import parse_config
from app.settings.section import ConfigError

COLOCATED: dict[str, Any] = {
    "device": "cuda",
    "placement": "colocated",
    "engine": {"num_replicas": 2, "gpus_per_rank": 0.6},
    "weights": {"transport": "ipc", "staging": "device"},
    "trainer": {"strategy": "fsdp2", "world_size": 2, "gpus_per_rank": 0.4},
}
SEPARATE: dict[str, Any] = {
    "device": "cuda",
    "weights": {"transport": "nccl", "staging": "device"},
    "trainer": {},
}


def complaint(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config({"model": "m", **settings})
    return str(caught.value)
