"""Code of others (rewards, environments, trackers): imported by its path, and named when it fails."""

import importlib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SHOWN_FRAMES = 3


def imported(path: str, option: str, expected: str = "package.module:function") -> Any:
    """The object at an import path that a command-line option gave; ValueError where there is none."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError(f"{option} must look like {expected}, got {path!r}")
    with blamed(f"{option} {path!r} cannot be imported: it"):
        return getattr(importlib.import_module(module_name), name)


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Turn an error of such code into a ValueError with its place, without our own frames."""
    try:
        yield
    except Exception as error:  # other people's code may raise anything
        _, _, *frames = traceback.extract_tb(error.__traceback__)  # this one, and its caller's
        theirs = [frame for frame in frames if "importlib" not in frame.filename]
        places = ", ".join(f"{Path(f.filename).name}:{f.lineno}" for f in theirs[-SHOWN_FRAMES:])
        where = f" ({places})" if places else ""
        raise ValueError(f"{what} raised {type(error).__name__}: {error}{where}") from error
