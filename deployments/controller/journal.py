"""The decisions on disk: JSON lines in a state directory, each synced before anybody acts on it.

A line that a crash truncated is dropped: nobody acted on it. On opening, the file is rewritten without
what later decisions supersede.

    header \\n decision \\n decision \\n ... 0 0 0 0     zero bytes: space reserved for what comes next

A full disk is no reason to stop serving: what the ledger itself decides (a member joins, is fenced, a round
ends) goes to the reserved space. What a publisher asks for is refused when no more can be reserved.
"""

import errno
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from deployments.controller.state_lock import JournalError, StateLock
from deployments.ledger.decisions import Decision, compact, decode, encode

SCHEMA = 1
NAME = "decisions.jsonl"
RESERVE_BYTES = 1 << 20  # some thousand decisions
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, a quota or a limit of the process


class Journal:
    """The file of decisions. One process writes it: open it, take `recovered`, then `append`.

    Args:
        lock_wait_s: how long another process that uses the directory may take to end.

    Raises:
        JournalError: the directory cannot be written, holds something else, or is in use.
    """

    def __init__(self, directory: Path, *, lock_wait_s: float = 0.0) -> None:
        self._path = directory / NAME
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = StateLock(directory, wait_s=lock_wait_s)
            try:
                self._open()
            except BaseException:  # whatever it was, the next process may use the directory
                self._lock.close()
                raise
        except JournalError:
            raise
        except OSError as error:
            raise JournalError(
                f"state directory {directory}: expected a directory that can be written, got: {error}"
            ) from error

    def _open(self) -> None:
        content = _read(self._path)
        decisions = _decisions(self._path, content)
        cut = _cut_short(content)
        self.recovered = compact([*decisions, *cut])
        try:
            self._end = _rewrite(self._path, self.recovered)
        except OSError as error:
            self._end = _whole_lines(_text(content))
            if error.errno not in NO_SPACE or not self._end:
                raise
            self._continue(len(content), cut)
            return
        self._file = self._path.open("r+b", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size

    def _continue(self, size: int, cut: Sequence[Decision]) -> None:
        """There is no space for a new file: go on in the old one, which has some reserved."""
        self._file, self._size = self._path.open("r+b", buffering=0), size
        self._write(bytes(size - self._end), self._end)  # a shorter line would not cover a longer one
        self.append(cut)

    def append(self, decisions: Iterable[Decision]) -> None:
        """Durable when it returns.

        Raises:
            OSError: the reserved space is used up and the disk is full, or the disk is gone.
        """
        lines = b"".join(encode(decision) + b"\n" for decision in decisions)
        if lines:
            self._write(lines, self._end)
            os.fsync(self._file.fileno())
            self._end += len(lines)
            self._size = max(self._size, self._end)

    def reserve(self) -> str | None:
        """Have space for decisions to come. Returns why not, for a person; None if there is enough."""
        if self._size - self._end >= RESERVE_BYTES // 2:
            return None
        try:
            os.posix_fallocate(self._file.fileno(), self._end, RESERVE_BYTES)
        except OSError as error:
            return str(error)
        self._size = self._end + RESERVE_BYTES
        return None

    def _write(self, content: bytes, offset: int) -> None:
        while content:
            written = os.pwrite(self._file.fileno(), content, offset)
            content, offset = content[written:], offset + written

    def close(self) -> None:
        self._file.close()
        self._lock.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _text(content: bytes) -> bytes:
    """Without the reserved space. What follows a zero byte was not synced: no decision has one."""
    return content.split(b"\0", 1)[0]


def _whole_lines(text: bytes) -> int:
    """The number of bytes up to the last newline."""
    return text.rfind(b"\n") + 1


def _decisions(path: Path, content: bytes) -> list[Decision]:
    """Those of whole lines. Raises JournalError."""
    if not path.exists():
        return []
    header, *lines = _text(content).split(b"\n")
    _check_schema(path, header)
    return [_decode(path, number, line) for number, line in enumerate(lines[:-1], start=2)]


def _cut_short(content: bytes) -> list[Decision]:
    """A last line without its newline may still be complete."""
    text = _text(content)
    try:
        return [decode(text[_whole_lines(text) :])]
    except ValueError:
        return []


def _check_schema(path: Path, header: bytes) -> None:
    try:
        found = json.loads(header)["schema"]
    except (ValueError, KeyError, TypeError):
        found = header[:80].decode(errors="replace")
    if found != SCHEMA:
        raise JournalError(
            f"{path}: expected schema {SCHEMA}, found {found!r}; it was written by another version of "
            "Slipstream: move it away to start a fleet from its first checkpoint"
        )


def _decode(path: Path, number: int, line: bytes) -> Decision:
    try:
        return decode(line)
    except ValueError as error:
        raise JournalError(
            f"{path}, line {number}: expected a decision, got {line[:200]!r}: {error}"
        ) from error


def _rewrite(path: Path, decisions: Iterable[Decision]) -> int:
    """Returns where the reserved space begins. Raises OSError; the old file is as it was then."""
    aside = path.with_suffix(".new")
    lines = [json.dumps({"schema": SCHEMA}).encode(), *map(encode, decisions)]
    content = b"".join(line + b"\n" for line in lines)
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.posix_fallocate(file.fileno(), len(content), RESERVE_BYTES)
            os.fsync(file.fileno())
        aside.rename(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return len(content)
