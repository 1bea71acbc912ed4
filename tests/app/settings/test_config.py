import subprocess
import sys
from pathlib import Path

import pytest

from app.settings.config import parse_config
from app.settings.weights import WeightsConfig
from deployments.protocol.ledger_config import LedgerConfig
from deployments.weights.transports.registry import TRANSPORTS


def test_adapters_are_loaded_from_the_users_roots_and_from_the_trainers_own_directory(tmp_path: Path) -> None:
    users = {"security": {"checkpoint_roots": ["/data"]}, "state_dir": str(tmp_path)}
    adapting = {
        "trainer": {"lora": {"name": "math"}},
        "engine": {"extra": {"enable_lora": True, "max_loras": 2}},
    }
    assert parse_config({"model": "m", **users}).adapter_roots == (Path("/data"),)
    own = tmp_path / "store" / "trainer" / "adapters"
    assert parse_config({"model": "m", **users, **adapting}).adapter_roots == (own, Path("/data"))


def test_a_merged_adapter_asks_nothing_of_the_engines(tmp_path: Path) -> None:
    merged = {"trainer": {"lora": {"publish": "merged", "rank": 64}}, "state_dir": str(tmp_path)}
    made = parse_config({"model": "m", **merged})
    assert not made.engine.serves_adapters and made.adapter_roots == ()


@pytest.mark.slow
def test_importing_the_configuration_and_the_launcher_imports_nothing_heavy() -> None:
    program = (
        "import sys, app.settings.config, app.command.launch, app.command.cli, app.jobs.options\n"
        "from app.settings.engine import check_engine_args\ncheck_engine_args({})\n"
        "print([name for name in ('torch', 'ray', 'vllm', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_registered_transport_can_be_configured_and_has_the_registrys_defaults(name: str) -> None:
    weights = WeightsConfig(transport=name)
    record = TRANSPORTS[name]
    assert weights.transport_record is record
    assert weights.effective_chunk_bytes == record.chunk_bytes
    assert weights.effective_staging_share == record.staging_share


def test_defaults_are_the_ledgers() -> None:
    assert WeightsConfig().ledger() == LedgerConfig()
