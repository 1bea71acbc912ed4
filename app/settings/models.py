"""Model names: the built-in model, a local directory, or a Hugging Face id.

`python -m app.settings.models prepare smollm2-135m` converts the built-in model and prints its directory.
"""

import argparse
import difflib
import re
import sys
from pathlib import Path

from app.settings.built_in_models import BUILT_IN, cache_directory, prepare

# Names that the hub accepts: NAME or ORGANISATION/NAME.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(name: str) -> str:
    """A directory or Hugging Face id that vLLM and transformers can load.

    Raises:
        ValueError: a path without a model, or a name that is none of the three.
    """
    if name in BUILT_IN:
        return str(prepare(BUILT_IN[name], cache_directory()))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"'model': expected a directory with a config.json, got {path}, which has none")
        return str(path.absolute())
    if name.startswith(("/", ".", "~")):
        problem = "is a file" if path.exists() else "does not exist"
        raise ValueError(f"'model': expected a directory with a config.json, got {name}, which {problem}")
    close = difflib.get_close_matches(name.lower(), BUILT_IN, n=1, cutoff=0.8)
    if close and "/" not in name:
        raise ValueError(f"'model': expected a model, got {name!r} (did you mean {close[0]!r}?)")
    if _HUB_ID.fullmatch(name) is None:
        raise ValueError(
            f"'model': expected {' or '.join(map(repr, BUILT_IN))}, a local directory, or a Hugging Face id "
            f"like 'Qwen/Qwen3-8B', got {name!r}"
        )
    return name


def model_name(name: str) -> str:
    """A name that says the same wherever it is read: a directory's is its absolute path."""
    path = Path(name).expanduser()
    return str(path.absolute()) if name not in BUILT_IN and path.is_dir() else name


def is_offline(name: str) -> bool:
    """Whether the model loads without a network, so no request to the hub is necessary."""
    return name in BUILT_IN or Path(name).expanduser().is_dir()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m app.settings.models", description="Prepare a model.")
    parser.add_argument("action", choices=["prepare"])
    parser.add_argument("model", help="a built-in model's name, a directory or a Hugging Face id")
    try:
        print(resolve_model(parser.parse_args().model))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
