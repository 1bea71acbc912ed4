"""A staged member, and an engine whose workers do as they are told."""

import pytest

from deployments.replica.staged_member import StagedMember
from tests.deployments.replica.fake_workers import Workers


@pytest.fixture
def engine() -> Workers:
    return Workers()


@pytest.fixture
def member(engine: Workers) -> StagedMember:
    return StagedMember(engine)  # type: ignore[arg-type]
