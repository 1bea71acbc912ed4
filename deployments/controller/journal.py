"""The decisions on disk: JSON lines in a state directory, each synced before anybody acts on it.

A line that a crash truncated is dropped: nobody acted on it. On opening, and each time that the file has
grown to a multiple of its size, it is rewritten without what later decisions supersede: a new file takes its
place once it is complete. A controller that starts reads all of it, and the fleet waits.

    header \\n decision \\n decision \\n ... 0 0 0 0     zero bytes: space reserved for what comes next

A full disk is no reason to stop serving: what the ledger itself decides (a member joins, is fenced, a round
ends) goes to the reserved space. What a publisher asks for is refused when no more can be reserved.

Neither is a directory that somebody moves or removes while the journal is open: a successor would find no
decision and start from the first checkpoint, so the whole journal is written again where it was.
"""

import errno
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from deployments.controller.disk import Disk, File, LocalDisk
from deployments.errors import JournalError
from deployments.ledger.compaction import compact
from deployments.ledger.decisions import Decision, decode, encode
from deployments.logs import serve_logger

SCHEMA = 1
NAME = "decisions.jsonl"
RESERVE_BYTES = 1 << 20  # some thousand decisions
REWRITE_BYTES = 8 << 20  # read in a second or two; a shorter file is left alone
REWRITE_GROWTH = 2  # and one that is shorter than so many times what was left the last time
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, a quota or a limit of the process
COMPACT_AFTER = 4096  # decisions kept in memory, beyond twice those that were left the last time

logger = serve_logger()


class Journal:
    """The file of decisions. One process writes it: open it, take `recovered`, then `append`.

    Not for two threads at once.

    Args:
        lock_wait_s: how long another process that uses the directory may take to end.

    Raises:
        JournalError: the directory cannot be written, holds something else, or is in use.
    """

    def __init__(self, directory: Path, *, lock_wait_s: float = 0.0, disk: Disk | None = None) -> None:
        self._directory = directory
        self._path = directory / NAME
        self._disk: Disk = LocalDisk() if disk is None else disk
        self._size = self._end = 0  # of the file; of what is written in it
        self._rewrite_at = 0  # bytes written in it
        try:
            self._lock = self._disk.lock(directory, lock_wait_s)
            try:
                self._file = self._open()
            except BaseException:  # whatever it was, the next process may use the directory
                self._lock.close()
                raise
        except JournalError:
            raise
        except OSError as error:
            raise JournalError(
                f"state directory {directory}: expected a directory that can be written, got: {error}"
            ) from error

    def _open(self) -> File:
        content = self._disk.read(self._path)
        decisions = [] if content is None else _decisions(self._path, content)
        cut = [] if content is None else _cut_short(content)
        self.recovered = compact([*decisions, *cut])
        self._kept = list(self.recovered)  # what the file says; a new one would say the same
        self._compact_at = len(self._kept)
        try:
            return self._rewrite()
        except OSError as error:
            self._end = 0 if content is None else _whole_lines(_text(content))
            if content is None or error.errno not in NO_SPACE or not self._end:
                raise
            return self._continue(len(content), cut)

    def _rewrite(self) -> File:
        """A new file with what is kept. Raises OSError; the old file is as it was then."""
        lines = [json.dumps({"schema": SCHEMA}).encode(), *map(encode, self._kept)]
        content = b"".join(line + b"\n" for line in lines)
        self._disk.replace(self._path, content, RESERVE_BYTES)
        file = self._disk.open(self._path)
        self._end, self._size = len(content), file.size()
        self._rewrite_at = max(REWRITE_BYTES, REWRITE_GROWTH * self._end)
        return file

    def _continue(self, size: int, cut: Sequence[Decision]) -> File:
        """There is no space for a new file: go on in the old one, which has some reserved."""
        file = self._disk.open(self._path)
        self._size, self._rewrite_at = size, self._end + REWRITE_BYTES
        file.write(bytes(size - self._end), self._end)  # a shorter line would not cover a longer one
        self._write(file, cut)
        return file

    def append(self, decisions: Iterable[Decision]) -> None:
        """Durable when it returns.

        Raises:
            OSError: the reserved space is used up and the disk is full, the disk is gone, or another
                journal took this one's place.
        """
        new = list(decisions)
        if not new:
            return
        self._keep(new)
        self._write(self._file, new)
        self.stay()
        if self._end > self._rewrite_at:
            self._shorten()

    def reserve(self) -> str | None:
        """Have space for decisions to come. Returns why not, for a person; None if there is enough."""
        if self.has_space:
            return None
        try:
            self._file.allocate(self._end, RESERVE_BYTES)
        except OSError as error:
            return str(error)
        self._size = self._end + RESERVE_BYTES
        return None

    @property
    def has_space(self) -> bool:
        """Whether there is enough reserved."""
        return self._size - self._end >= RESERVE_BYTES // 2

    def stay(self) -> None:
        """Write everything again if the file is not where it was. Durable when it returns.

        Raises:
            JournalError: another journal took its place, or another process uses the directory.
            OSError: the disk is gone.
        """
        if self._file.is_at(self._path):
            return
        if not self._lock.is_at(self._directory):
            lock = self._disk.lock(self._directory, 0.0)
            self._lock.close()
            self._lock = lock
        if self._disk.read(self._path) is not None:
            raise JournalError(
                f"{self._path}: another file took this journal's place while a controller uses it; stop the "
                "fleet, and put back the one that is this fleet's"
            )
        self._file.close()
        self._file = self._rewrite()
        logger.error("%s was moved or removed while in use: it is written again", self._path)

    def _shorten(self) -> None:
        """Write a new file without what is superseded; if there is no space for one, go on in the old file.

        Raises:
            OSError: the new file has its place, and cannot be used; it has every decision.
        """
        self._kept = compact(self._kept)
        self._compact_at = len(self._kept)
        old = self._file
        try:
            self._file = self._rewrite()
        except OSError as error:
            if not old.is_at(self._path):
                raise
            self._rewrite_at = self._end + REWRITE_BYTES
            logger.warning("%s is not written anew, and grows: %s", self._path, error)
        else:
            old.close()

    def _keep(self, decisions: Sequence[Decision]) -> None:
        self._kept += decisions
        if len(self._kept) > 2 * self._compact_at + COMPACT_AFTER:
            self._kept = compact(self._kept)
            self._compact_at = len(self._kept)

    def _write(self, file: File, decisions: Iterable[Decision]) -> None:
        lines = b"".join(encode(decision) + b"\n" for decision in decisions)
        if lines:
            file.write(lines, self._end)
            file.sync()
            self._end += len(lines)
            self._size = max(self._size, self._end)

    def close(self) -> None:
        self._file.close()
        self._lock.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _text(content: bytes) -> bytes:
    """Without the reserved space. What follows a zero byte was not synced: no decision has one."""
    return content.split(b"\0", 1)[0]


def _whole_lines(text: bytes) -> int:
    """The number of bytes up to the last newline."""
    return text.rfind(b"\n") + 1


def _decisions(path: Path, content: bytes) -> list[Decision]:
    """Those of whole lines. Raises JournalError."""
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
            "Slipstream: move it and the store away to start a fleet from its first checkpoint"
        )


def _decode(path: Path, number: int, line: bytes) -> Decision:
    try:
        return decode(line)
    except ValueError as error:
        raise JournalError(
            f"{path}, line {number}: expected a decision, got {line[:200]!r}: {error}"
        ) from error
