import pytest

from app.settings.weights import WeightsConfig, quoted
from deployments.ledger.ledger_config import LedgerConfig
from deployments.weights.transports.registry import TRANSPORTS
from tests.app.settings.complaints import complaint


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_registered_transport_can_be_configured_and_has_the_registrys_defaults(name: str) -> None:
    weights = WeightsConfig(transport=name)
    record = TRANSPORTS[name]
    assert weights.transport_record is record
    assert weights.effective_chunk_bytes == record.chunk_bytes
    assert weights.effective_staging_share == record.staging_share


def test_an_unknown_transport_is_answered_with_the_registered_names() -> None:
    assert complaint(weights={"transport": "tcp"}) == (
        f"'weights.transport': expected {quoted(list(TRANSPORTS))}, got 'tcp'"
    )


def test_defaults_are_the_ledgers() -> None:
    assert WeightsConfig().ledger() == LedgerConfig()
