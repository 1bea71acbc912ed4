from types import SimpleNamespace
from typing import Any

import pytest

from deployments.weights.staging.transfer_engine import check_draft


def configuration(method: str | None, draft: str = "org/draft") -> Any:
    speculative = SimpleNamespace(method=method, draft_model_config=SimpleNamespace(model=draft))
    return SimpleNamespace(
        model_config=SimpleNamespace(model="org/model"), speculative_config=speculative if method else None
    )


def test_a_draft_from_the_served_checkpoint_is_refused() -> None:
    expected = (
        r"^speculative decoding with method 'mtp' loads a draft model from .*, 'org/model', and updates"
    )
    with pytest.raises(ValueError, match=expected):
        check_draft(configuration("mtp", draft="org/model"))


@pytest.mark.parametrize("method", [None, "eagle3", "draft_model"])
def test_other_drafts_are_no_part_of_a_version(method: str | None) -> None:
    check_draft(configuration(method))


@pytest.mark.parametrize("method", ["ngram", "suffix", "extract_hidden_states"])
def test_a_method_without_weights_may_name_the_served_model(method: str) -> None:
    check_draft(configuration(method, draft="org/model"))
