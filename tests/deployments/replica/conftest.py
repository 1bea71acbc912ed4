"""A staged member over the real engine, whose vLLM has two workers that answer as they are told to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # they load vLLM, which most tests of this folder need not
    from deployments.replica.member import StagedMember
    from tests.deployments.replica.fake_vllm import FakeLlm


@pytest.fixture
def llm() -> FakeLlm:
    from tests.deployments.replica.fake_vllm import FakeLlm

    return FakeLlm(workers=2)


@pytest.fixture
def member(llm: FakeLlm) -> StagedMember:
    from tests.deployments.replica.fake_vllm import staged_member

    return staged_member(llm)
