"""Where the files of a hub id are on this host."""

import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from deployments.weights.store.hub import downloaded
from tests.fake_hub import FakeHub


def test_a_directory_is_left_alone(tmp_path: Path, hub: FakeHub) -> None:
    assert downloaded(str(tmp_path)) == tmp_path
    assert hub.asked == []


def test_a_hub_id_is_downloaded_without_weights_in_other_formats(tmp_path: Path, hub: FakeHub) -> None:
    hub.repositories["org/tiny"] = tmp_path
    assert downloaded("org/tiny", "v2") == tmp_path
    ((model, options),) = hub.asked
    assert (model, options["revision"]) == ("org/tiny", "v2")
    assert {"*.safetensors", "*.json", "*.model", "tokenizer*"} <= set(options["allow_patterns"])
    assert options["ignore_patterns"] == ["*/*", "consolidated*"]


@pytest.mark.parametrize("model", ["org/other", "/no/such/directory", "a/b/c"])
def test_what_cannot_be_downloaded_gets_a_sentence(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own library says it; it has no network here."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=re.escape(f"can be downloaded, got {model!r}: ")) as caught:
        downloaded(model)
    assert "\n" not in str(caught.value)


def test_an_error_of_the_hubs_http_library_is_a_sentence_too(hub: FakeHub) -> None:
    class ProxyError(Exception):
        """As of httpx2: no OSError."""

    def fails(*args: Any, **options: Any) -> str:
        raise ProxyError("407 Proxy\n Authentication Required")

    hub.download = fails
    with pytest.raises(ValueError, match="ProxyError: 407 Proxy Authentication Required"):
        downloaded("org/tiny")
    hub.download = lambda *args, **options: _raise(LocalEntryNotFoundError("no network"))
    with pytest.raises(ValueError, match="LocalEntryNotFoundError: no network"):
        downloaded("org/tiny")


def _raise(error: Exception) -> str:
    raise error
