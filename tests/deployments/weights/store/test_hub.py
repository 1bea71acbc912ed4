import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import snapshot_download
from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache
from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError
from safetensors.torch import save_file

from deployments.weights.store.checkpoint_files import INDEX
from deployments.weights.store.hub import (
    cached,
    downloaded,
    model_files,
    read_schema,
    schema_of,
    write_model_files,
)
from deployments.weights.wire.checkpoint_schema import TensorSpec
from tests.fake_hub import FakeHub
from tests.tiny_models import save_tiny_llama


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
def test_failed_download_is_one_sentence(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_an_engine_was_loaded_from_is_looked_for_in_its_cache_alone(
    tmp_path: Path, hub: FakeHub
) -> None:
    hub.repositories["org/tiny"] = tmp_path
    assert cached("org/tiny", "v2", "/large") == tmp_path
    ((_, options),) = hub.asked
    assert (options["revision"], options["cache_dir"], options["local_files_only"]) == ("v2", "/large", True)
    assert cached(str(tmp_path)) == tmp_path
    assert cached("org/other") == Path("org/other"), "not there"
    assert len(hub.asked) == 2


@pytest.mark.parametrize("name", ["s3://bucket/model", "org/repo:Q4_K_M", "/no/such/model.gguf"])
def test_a_name_that_is_no_hub_id_is_left_to_vllm(name: str) -> None:
    assert cached(name) == Path(name)


def test_cache_without_files_that_vllm_does_not_use_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's own library, and a cache as vLLM leaves it: the list of all files, and not all of them."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository, commit = tmp_path / "models--org--tiny", "a" * 40
    snapshot = save_tiny_llama(repository / "snapshots" / commit, 1)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    names = [file.name for file in snapshot.iterdir()] + ["README.md"]
    write_tree_cache(str(repository), commit, {name: TreeCacheEntry(size=1, blob_id="b") for name in names})
    with pytest.raises(IncompleteSnapshotError):
        snapshot_download("org/tiny", cache_dir=tmp_path, local_files_only=True)
    assert cached("org/tiny", cache_dir=str(tmp_path)) == snapshot


def test_the_schema_of_a_whole_checkpoint_is_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = save_tiny_llama(tmp_path, 1)
    assert schema_of(directory, "auto", of_hub=True) == read_schema(directory) is not None
    assert caplog.messages == []


def test_incomplete_checkpoint_in_the_cache_has_no_schema(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer of the same host may be downloading it."""
    directory = save_tiny_llama(tmp_path, 1)
    weight_map = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert schema_of(directory, "auto", of_hub=True) is None
    assert "names, shapes and completeness of updates are not checked" in caplog.text


def test_mistrals_own_names_say_nothing_of_an_update(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = save_tiny_llama(tmp_path, 1) / "model.safetensors"
    file.rename(tmp_path / "consolidated.safetensors")
    assert schema_of(tmp_path, "auto", of_hub=True) is None
    assert schema_of(tmp_path, "auto", of_hub=False) is not None


def test_dummy_weights_cause_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert schema_of(tmp_path, "dummy", of_hub=False) is None and caplog.messages == []
    assert schema_of(tmp_path, "auto", of_hub=False) is None and len(caplog.messages) == 1


def _raise(error: Exception) -> str:
    raise error


COPIED = {"config.json", "tokenizer.json", "chat_template.jinja"}
WEIGHTS = {
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "x.gguf",
    "manifest.json",
}


def test_every_file_but_the_weights_is_copied_as_it_was_when_the_model_was_loaded(tmp_path: Path) -> None:
    model, target = tmp_path / "model", tmp_path / "target"
    (model / "sub").mkdir(parents=True)
    target.mkdir()
    for name in COPIED | WEIGHTS:
        (model / name).write_text(name)
    files = model_files(model)
    for name in (*COPIED, "tokenizer_config.json"):
        (model / name).write_text("another model's")
    write_model_files(files, target)
    assert {file.name: file.read_text() for file in target.iterdir()} == {name: name for name in COPIED}
    for other in (model / "x.gguf", tmp_path / "none"):
        with pytest.raises(ValueError, match="expected a configuration and a tokenizer"):
            write_model_files(model_files(other), target)


# -- schemas --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_the_schema_is_read_from_the_headers_alone(tmp_path: Path, tied: bool) -> None:
    directory = save_tiny_llama(tmp_path, 1, tied=tied)
    (file,) = directory.glob("*.safetensors")
    header_bytes = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    os.truncate(file, header_bytes)
    schema = read_schema(directory)
    assert schema is not None
    assert schema["model.embed_tokens.weight"] == TensorSpec(dtype="float32", shape=(258, 128))
    assert ("lm_head.weight" in schema) is not tied


def test_the_same_weights_in_another_format_beside_them_are_no_tensors_of_the_model(tmp_path: Path) -> None:
    """As Mistral's repositories have them, and those that keep the file that was sharded."""
    directory = save_tiny_llama(tmp_path, 1)
    expected = read_schema(directory)
    save_file({"layers.0.attention.wq.weight": torch.ones(1)}, directory / "consolidated.safetensors")
    assert read_schema(directory) == expected
    save_file({"old": torch.ones(1)}, directory / "old.safetensors")
    weight_map = dict.fromkeys(expected or {}, "model.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert read_schema(directory) == expected


def test_mistrals_own_format_alone_is_the_model(tmp_path: Path) -> None:
    save_file({"norm.weight": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    assert read_schema(tmp_path) == {"norm.weight": TensorSpec(dtype="float32", shape=(1,))}


def test_a_directory_without_weights_has_no_schema(tmp_path: Path) -> None:
    assert read_schema(tmp_path) is None
