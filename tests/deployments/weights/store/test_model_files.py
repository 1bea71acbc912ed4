"""What is copied of a checkpoint beside its weights."""

from pathlib import Path

from deployments.weights.store.model_files import copy_model_files

COPIED = {"config.json", "tokenizer.json", "chat_template.jinja"}
WEIGHTS = {
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "x.gguf",
    "manifest.json",
}


def test_every_file_but_the_weights_is_copied(tmp_path: Path) -> None:
    model, target = tmp_path / "model", tmp_path / "target"
    (model / "sub").mkdir(parents=True)
    target.mkdir()
    for name in COPIED | WEIGHTS:
        (model / name).write_text(name)
    copy_model_files(str(model), target)
    assert {file.name: file.read_text() for file in target.iterdir()} == {name: name for name in COPIED}
