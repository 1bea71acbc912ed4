"""The fleet that most tests share: two vLLM engines on a tiny model, and a trainer."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.fleet.deployed import Fleet, deployed
from tests.fleet.keeping import KEEPER

KEPT = 12  # versions: those of a test of ten rounds


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return KEEPER.fleet("shared", tmp_path_factory, _start)


def _start(root: Path) -> AbstractContextManager[Fleet]:
    from tests.tiny_models import save_tiny_llama

    changes = {
        # "parameter": a call's arguments are those of the tool's schema, whatever the model is.
        "engine": {
            "extra": {
                "enable_auto_tool_choice": True,
                "tool_call_parser": "hermes",
                "tool_strict_level": "parameter",
            }
        },
        "router": {
            "max_body_bytes": 1 << 20,
            "request_timeout_s": 30,
        },
        "store": {"keep": KEPT},
        "weights": {"proof": {"sequences": 4}},
        "rollouts": {},
        "security": {"checkpoint_roots": [str(root / "published"), f"file://{root / 'published'}"]},
    }
    return deployed("shared", save_tiny_llama(root / "model", seed=1), root, changes)
