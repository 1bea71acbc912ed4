from typing import Any

import pytest

from deployments.trainer.lost_version import is_lost


def fleet(
    *members: tuple[str, int], committed: int = 4, stored: int | None = 3, **fields: Any
) -> dict[str, Any]:
    return {
        "committed_version": committed,
        "stored_version": stored,
        "round": None,
        "members": [
            {"state": state, "version": version, "admitted": state == "serving"} for state, version in members
        ],
        **fields,
    }


@pytest.mark.parametrize(
    ("state", "lost"),
    [
        (fleet(("joining", 3), ("joining", 3)), True),
        (fleet(("joining", 0), stored=None), True),
        (fleet(("joining", 3), ("fenced", 3)), True),
        (fleet(("joining", 3), stored=4), False),  # it catches up from the store
        (fleet(("joining", 3), ("serving", 4)), False),  # one still has it, and the store may be on its way
        (fleet(("joining", 4)), False),  # about to be admitted
        (fleet(("joining", 0), committed=0, stored=None), False),  # the first version is the checkpoint
        (fleet(), False),  # nobody waits
        (fleet(("joining", 3), round={"round_id": 5}), False),  # the round brings a newer one
    ],
)
def test_a_version_is_lost_when_joiners_wait_for_what_nobody_has(state: dict[str, Any], lost: bool) -> None:
    assert is_lost(state) is lost
