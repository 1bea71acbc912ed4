"""A fleet that serves LoRA adapters, beside the session's fleet and in its cluster."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ray import serve

from tests.fleet.session_fleet import MODEL, PORT, Fleet

SLOTS = 4  # adapters that an engine has room for


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """A fleet that serves adapters; users keep theirs below `root`."""

    fleet: Fleet
    root: Path
    transport: str = "shm"

    def save(self, name: str, seed: int, **options: Any) -> Path:
        from tests.tiny_adapters import save_tiny_adapter

        return save_tiny_adapter(self.root / name, seed, **options)


@pytest.fixture(scope="module")
def adapted(
    fleet: Fleet, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Adapted]:
    """Its parameter: the transport."""
    root, transport = tmp_path_factory.mktemp("adapters"), getattr(request, "param", "shm")
    from app.main import build
    from app.settings.config import parse_config
    from deployments.trainer.spec import adapter_directory

    config = parse_config(
        {
            "model": str(fleet.checkpoint),
            "served_model_name": MODEL,
            "state_dir": str(root / "state"),
            "engine": {
                "dtype": "float32",
                "max_model_len": 1024,
                "enforce_eager": True,
                "num_replicas": 2,
                "extra": {"enable_lora": True, "max_loras": SLOTS, "max_lora_rank": 8},
            },
            "weights": {"transport": transport, "lease_s": 30, "heartbeat_timeout_s": 20},
            "security": {
                "checkpoint_roots": [str(root / "user"), str(adapter_directory(root / "state" / "store"))]
            },
            "trainer": {"optimizer": {"learning_rate": 0.02}},
        }
    )
    serve.run(build(config), name="adapters", route_prefix="/adapters")
    try:
        served = Fleet(
            url=f"http://127.0.0.1:{PORT}/adapters",
            checkpoint=fleet.checkpoint,
            store=root / "state" / "store",
        )
        yield Adapted(fleet=served, root=root / "user", transport=transport)
    finally:
        serve.delete("adapters")
