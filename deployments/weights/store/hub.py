"""Where a model's files are on this host, also if its name is a Hugging Face id.

downloaded   a trainer's: all that a checkpoint needs
cached       an engine's: vLLM has downloaded what it loads
"""

from collections.abc import Sequence
from pathlib import Path

from deployments.weights.wire.checkpoint_schema import MISTRAL

# Not *.bin and the like, of which a repository may have as many bytes again.
_NEEDED: Sequence[str] = (
    *("*.safetensors", "*.json", "*.py", "*.txt", "*.model", "*.jinja", "*.tiktoken"),
    *("tokenizer*", "chat_template*"),
)
_NOT_NEEDED = ("*/*", f"{MISTRAL}*")  # other formats, many of them in folders


def downloaded(model: str, revision: str | None = None) -> Path:
    """The directory of a checkpoint; downloaded, if the hub's cache does not have it. The hub's own locks
    make processes of one host wait for each other.

    Args:
        model: a directory, which is left alone, or a hub id.
        revision: of the hub's repository; None: its main branch.

    Raises:
        ValueError: it is neither, or cannot be downloaded.
    """
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
