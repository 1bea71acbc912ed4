"""Where `/train/save` may write: a new or an empty directory, as what is there may be somebody else's."""

from pathlib import Path

from deployments.errors import InvalidRequest


def directory_to_save(path: str | None, default: Path) -> Path:
    """The directory, which is there when this returns.

    Args:
        path: absolute; None: `default`, which an earlier call may have written.

    Raises:
        InvalidRequest: it is not absolute, has files in it, or cannot be written.
    """
    if path is None:
        default.mkdir(parents=True, exist_ok=True)
        return default
    try:
        directory = Path(path).expanduser()
        if not directory.is_absolute():
            raise InvalidRequest(f"path must be absolute, got {path[:200]!r}")
        directory.mkdir(parents=True, exist_ok=True)
        if next(directory.iterdir(), None) is not None:
            raise InvalidRequest(f"path must be a new or an empty directory, got {path[:200]!r}")
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte; no such user
        raise InvalidRequest(
            f"path must be a directory that can be written, got {path[:200]!r}: {error}"
        ) from error
    return directory
