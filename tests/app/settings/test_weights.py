import pytest

from app.settings.weights import WeightsConfig, quoted
from deployments.ledger.ledger_config import LedgerConfig
from deployments.protocol.poll import CommitMode
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


def test_configured_values_replace_the_transports_defaults() -> None:
    weights = WeightsConfig(transport="nccl", chunk_bytes=1 << 20, staging_share=1.0)
    assert (weights.effective_chunk_bytes, weights.effective_staging_share) == (1 << 20, 1.0)


def test_defaults_are_the_ledgers() -> None:
    assert WeightsConfig().ledger() == LedgerConfig()


def test_the_ledger_gets_its_part() -> None:
    ledger = WeightsConfig(commit=CommitMode.ROLLING, lease_s=90).ledger()
    assert type(ledger) is LedgerConfig
    assert (ledger.commit, ledger.lease_s) == (CommitMode.ROLLING, 90)


@pytest.mark.parametrize(
    ("names", "text"), [(["a"], "'a'"), (["a", "b"], "'a' or 'b'"), (["a", "b", "c"], "'a', 'b' or 'c'")]
)
def test_names_are_listed_for_a_sentence(names: list[str], text: str) -> None:
    assert quoted(names) == text
