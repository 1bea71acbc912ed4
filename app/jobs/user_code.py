import importlib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SHOWN_FRAMES = 3


def imported(path: str, option: str, expected: str = "package.module:function") -> Any:
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError(f"{option} must look like {expected}, got {path!r}")
    with blamed(f"{option} {path!r} cannot be imported: it"):
        return getattr(importlib.import_module(module_name), name)


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Turn an error into a ValueError with its place, without our own frames."""
    try:
        yield
    except Exception as error:  # foreign code may raise anything
        _, _, *frames = traceback.extract_tb(error.__traceback__)  # this one and its caller's
        theirs = [frame for frame in frames if "importlib" not in frame.filename]
        places = ", ".join(f"{Path(f.filename).name}:{f.lineno}" for f in theirs[-SHOWN_FRAMES:])
        where = f" ({places})" if places else ""
        raise ValueError(f"{what} raised {type(error).__name__}: {error}{where}") from error
