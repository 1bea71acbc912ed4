"""The decisions on disk: JSON lines in a state directory, each synced before anybody acts on it.

A line that a crash truncated is dropped: nobody acted on it. On opening, the file is rewritten without
what later decisions supersede.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from deployments.ledger.decisions import Decision, compact, decode, encode

SCHEMA = 1
NAME = "decisions.jsonl"


class JournalError(OSError):
    """The state directory cannot be used; the message says what a person has to change."""


class Journal:
    """The file of decisions. One process writes it: open it, take `recovered`, then `append`.

    Raises:
        JournalError: the directory cannot be written, or holds something else.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.recovered = compact(_read(self._path))
            _rewrite(self._path, self.recovered)
            self._file = self._path.open("ab")
        except JournalError:
            raise
        except OSError as error:
            raise JournalError(
                f"state directory {directory}: expected a directory that can be written, got: {error}"
            ) from error

    def append(self, decisions: Iterable[Decision]) -> None:
        """Durable when it returns.

        Raises:
            OSError: the disk is full, or gone.
        """
        lines = b"".join(encode(decision) + b"\n" for decision in decisions)
        if lines:
            self._file.write(lines)
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read(path: Path) -> list[Decision]:
    if not path.exists():
        return []
    content = path.read_bytes()
    header, *lines = content.split(b"\n")
    _check_schema(path, header)
    truncated = lines.pop() if lines else b""  # what follows the last newline; empty after a clean write
    decisions = [_decode(path, number, line) for number, line in enumerate(lines, start=2)]
    if truncated:
        decisions += _decode_truncated(truncated)
    return decisions


def _decode_truncated(line: bytes) -> list[Decision]:
    """A last line without its newline may still be complete."""
    try:
        return [decode(line)]
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


def _rewrite(path: Path, decisions: Iterable[Decision]) -> None:
    aside = path.with_suffix(".new")
    with aside.open("wb") as file:
        file.write(json.dumps({"schema": SCHEMA}).encode() + b"\n")
        for decision in decisions:
            file.write(encode(decision) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
