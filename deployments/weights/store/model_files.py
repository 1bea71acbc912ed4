"""The files of a checkpoint that hold no weights: config, tokenizer, chat template."""

import shutil
from pathlib import Path

from deployments.weights.store.hub import cached
from deployments.weights.store.versions import MANIFEST

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json", MANIFEST)


def copy_model_files(model: str, directory: Path) -> None:
    """Copy every file of a checkpoint that holds no weights.

    Args:
        model: a directory, or a hub id whose files are in the hub's cache.

    Raises:
        OSError: a file cannot be copied, or the hub's cache does not have the model.
    """
    for file in cached(model).iterdir():
        if file.is_file() and not any(file.match(pattern) for pattern in _WEIGHT_FILES):
            shutil.copyfile(file, directory / file.name)
