"""Which staging the engines are started with."""

from typing import Any

import pytest

from app.settings.config import parse_config
from app.settings.staging import staging
from tests.app.settings.complaints import COLOCATED, SEPARATE


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "automatic"),
        ({"engine": {"extra": {"enable_lora": True}}}, "host"),
        ({"device": "cuda", "weights": {"transport": "nccl"}}, "host"),
        ({"weights": {"staging": "host"}}, "host"),
        ({"weights": {"staging": "device"}}, "device"),
        (COLOCATED, "device"),
        (SEPARATE | {"weights": {"transport": "nccl", "staging": "none"}}, "none"),
    ],
)
def test_the_staging_is_the_configured_one_or_that_of_the_device(
    settings: dict[str, Any], expected: str
) -> None:
    assert staging(parse_config({"model": "m", **settings})) == expected
