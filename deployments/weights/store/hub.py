"""A model's files on this host, also of a Hugging Face id, and their tensors.

`downloaded` has all that a trainer's checkpoint needs; `cached` what vLLM has downloaded for an engine.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import _TYPES as SAFETENSORS_DTYPES

from deployments.host.logs import serve_logger
from deployments.weights.store.checkpoint_files import MISTRAL, files_of, indexed_files, read_header
from deployments.weights.store.versions import MANIFEST
from deployments.weights.wire.checkpoint_schema import Schema, TensorSpec

CONFIG = "config.json"
# Not *.bin: a repository may have as many bytes of these again.
_NEEDED: Sequence[str] = (
    *("*.safetensors", "*.json", "*.py", "*.txt", "*.model", "*.jinja", "*.tiktoken"),
    *("tokenizer*", "chat_template*"),
)
_NOT_NEEDED = ("*/*", f"{MISTRAL}*")  # other formats, many of them in folders
logger = serve_logger()


def downloaded(model: str, revision: str | None = None) -> Path:
    """The checkpoint's directory, downloaded unless cached. Raises ValueError: neither a directory nor a hub
    id that can be downloaded."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                model, revision=revision, allow_patterns=[*_NEEDED], ignore_patterns=[*_NOT_NEEDED]
            )
        )
    except Exception as error:  # the hub's errors and those of its HTTP library have no base in common
        reason = " ".join(str(error).split())
        raise ValueError(
            f"'model': expected a checkpoint directory, or a Hugging Face id that can be downloaded, got "
            f"{model!r}: {type(error).__name__}: {reason:.500}"
        ) from error


def cached(model: str, revision: str | None = None, cache_dir: str | None = None) -> Path:
    """The directory that an engine of this host was loaded from, or the name as a path if the hub's cache
    lacks it. Does not use the network. `cache_dir`: the engine's `download_dir`."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        # One pattern: the cache lacks files that vLLM does not use, which the hub calls incomplete.
        found = snapshot_download(
            model, revision=revision, cache_dir=cache_dir, local_files_only=True, allow_patterns=[CONFIG]
        )
    except (OSError, ValueError):
        return Path(model)
    return Path(found)


def commit_of(model: str, revision: str | None = None, *, preferred: str | None = None) -> str | None:
    """The commit of a hub id that an engine of this host loads: the preferred one, which only an offline host
    can lack; else the hub's, or if it is unreachable the cache's. None: neither knows it."""
    from huggingface_hub import constants
    from vllm.transformers_utils.repo_utils import resolve_revision

    if preferred is not None and (not constants.HF_HUB_OFFLINE or cached(model, preferred).is_dir()):
        return preferred
    return getattr(resolve_revision(model, revision), "resolved", None)


def schema_of(directory: Path, load_format: str, *, of_hub: bool) -> Schema | None:
    """The tensors that an update of an engine must have; None, with a warning, if that is unknown.
    `directory`: what the engine was loaded from; `of_hub`: it is the hub's, which may hold a part. Raises
    ValueError if a file has no safetensors header."""
    schema = complete_schema(directory, of_hub=of_hub)
    if schema is None and load_format != "dummy":
        logger.warning(
            "names, shapes and completeness of updates are not checked: %s has no complete checkpoint in "
            "safetensors on this host (load_format %s)",
            directory,
            load_format,
        )
    return schema


def complete_schema(directory: Path, *, of_hub: bool) -> Schema | None:
    """As `schema_of`. None: absent, incomplete, or another format."""
    if not directory.is_dir():
        return None
    if of_hub:
        try:
            files = files_of(directory)
        except ValueError:
            return None
        if all(file.name.startswith(MISTRAL) for file in files):
            return None
    return read_schema(directory)


def read_schema(directory: Path) -> Schema | None:
    """By the file headers; None without safetensors files. Raises as `schema_of`."""
    files = sorted(directory.glob("*.safetensors"))
    named = indexed_files(directory)
    if named is None:
        named = {file.name for file in files if not file.name.startswith(MISTRAL)}
    schema: dict[str, TensorSpec] = {}
    # Not those that hold the same weights again.
    for file in [file for file in files if file.name in named] or files:
        for name, entry in read_header(file).entries.items():
            if entry.dtype not in SAFETENSORS_DTYPES:
                raise ValueError(f"{file} has no safetensors header that can be read: dtype {entry.dtype!r}")
            dtype = str(SAFETENSORS_DTYPES[entry.dtype]).removeprefix("torch.")
            schema[name] = TensorSpec(dtype=dtype, shape=entry.shape)
    return schema or None


def model_files(directory: Path) -> Mapping[str, bytes]:
    """What a checkpoint needs beside its weights, by file name. Read it when the model loads: the directory
    may be overwritten before a version is stored."""
    needed = {file for pattern in _NEEDED for file in directory.glob(pattern) if file.is_file()}
    weights = ("*.safetensors", "*.index.json", MANIFEST)
    return {
        file.name: file.read_bytes() for file in needed if not any(file.match(pattern) for pattern in weights)
    }


def write_model_files(files: Mapping[str, bytes], directory: Path) -> None:
    """Raises ValueError without files, as for GGUF or object storage."""
    if not files:
        raise ValueError("expected a configuration and a tokenizer beside the model's weights, got neither")
    for name, content in files.items():
        (directory / name).write_bytes(content)
