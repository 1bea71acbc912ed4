"""A fleet with the other settings: LoRA adapters, gloo, rolling commits, kept caches, two trainer ranks.

vLLM's engine with adapters dies on a CPU of `prompt_logprobs` in a batch; replicas refuse them.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.deployed import Fleet, deployed
from tests.fleet.keeping import KEEPER

TRANSPORT = "gloo"
RANKS = 2
SLOTS = 4  # adapters that an engine has room for


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """A fleet that serves adapters; users keep theirs below `root`."""

    fleet: Fleet
    root: Path

    def save(self, name: str, seed: int, **options: Any) -> Path:
        from tests.tiny_adapters import save_tiny_adapter

        return save_tiny_adapter(self.root / name, seed, **options)


@pytest.fixture
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    fleet = KEEPER.fleet("gloo", tmp_path_factory, _start)
    return Adapted(fleet=fleet, root=fleet.published / "adapters")


def _start(root: Path) -> AbstractContextManager[Fleet]:
    from deployments.trainer.spec import adapter_directory
    from tests.tiny_models import save_tiny_llama

    # The second one for trainers of adapters that are applications of their own.
    roots = (root / "published", adapter_directory(root / "state" / "store"))
    changes = {
        "engine": {"extra": {"enable_lora": True, "max_loras": SLOTS, "max_lora_rank": 8}},
        "weights": {"transport": TRANSPORT, "commit": "rolling", "kv_cache": "keep", "chunk_bytes": 1 << 16},
        "trainer": {"strategy": "fsdp2", "world_size": RANKS},
        "rollouts": {},
        "security": {"checkpoint_roots": [str(each) for each in roots]},
    }
    return deployed("gloo", save_tiny_llama(root / "model", seed=1), root, changes)
