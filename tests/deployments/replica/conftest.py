"""A staged member, and an engine whose workers do as they are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # they load vLLM, which most tests of this folder need not
    from deployments.replica.staged_member import StagedMember
    from tests.deployments.replica.fake_workers import Workers


@pytest.fixture
def engine() -> Workers:
    from tests.deployments.replica.fake_workers import Workers

    return Workers()


@pytest.fixture
def member(engine: Workers) -> StagedMember:
    from deployments.replica.staged_member import StagedMember

    return StagedMember(engine)  # type: ignore[arg-type]
