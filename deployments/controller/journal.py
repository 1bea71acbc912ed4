"""The ledger's decisions on disk: a sqlite database in the state directory.

A decision is synced before it takes effect. The same transaction deletes superseded ones, so the file does
not grow.

In sqlite's EXCLUSIVE locking mode one process uses the file, the kernel releases its lock at exit, and no
memory is shared, so a network file system will do.

On a full disk, spare pages and a write-ahead log of constant length hold the ledger's own decisions (a member
joins, is fenced, a round ends); publishers are refused. They are also refused while the file is moved,
removed or unmounted: it stays in use, but a successor would not find it.
"""

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from deployments.host.durable_files import sync
from deployments.host.logs import serve_logger
from deployments.ledger.decisions import Decision, Lasting, decode, encode
from deployments.protocol.errors import JournalError

SCHEMA = 4
NAME = "decisions.sqlite"
RESERVE_BYTES = 1 << 20  # several thousand decisions
CHECKPOINT_PAGES = 64  # 4 KiB each; on a full disk a transaction has the reserve minus these
NO_SPACE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)  # full disk; quota or process limit
TABLES = f"""
PRAGMA journal_mode=WAL;
PRAGMA user_version={SCHEMA};
CREATE TABLE IF NOT EXISTS decisions (number INTEGER PRIMARY KEY, decision TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS spare (zeros BLOB NOT NULL);
"""

logger = serve_logger()


class Journal:
    """Not for two threads at once.

    Args:
        lock_wait_s: how long to wait while another process uses the file.

    Raises:
        JournalError: the directory cannot be written, the file is in use, damaged or of another
        version.
    """

    def __init__(self, directory: Path, *, lock_wait_s: float = 0.0) -> None:
        self._path = directory / NAME
        self._file = -1
        self.has_space = False  # whether what the ledger decides can be written on a full disk
        with self._named_errors():
            if not self._path.exists():
                self._create()
            self._open(lock_wait_s)

    def append(self, decisions: Iterable[Decision]) -> None:
        """Durable when it returns. Raises JournalError: no space, no disk, or another file in its place."""
        rows: list[tuple[int, str]] = []
        superseded: list[tuple[int]] = []
        for decision in decisions:
            self._last += 1
            rows.append((self._last, encode(decision).decode()))
            superseded += [(number,) for number in self._lasting.add(self._last, decision)]
        if not rows:
            return
        with self._named_errors():
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany("INSERT INTO decisions VALUES (?, ?)", rows)
                self._db.executemany("DELETE FROM decisions WHERE number = ?", superseded)
            self._look_at_space()

    def reserve(self) -> str | None:
        """Returns why a publisher's decisions cannot be kept. Raises JournalError: the disk is gone."""
        if self.has_space and self.is_in_place():
            return None
        self.has_space = False
        with self._named_errors():
            if not self.is_in_place():
                return f"{self._path} is not there any more: put it back, or mount its disk again"
            try:
                # A transaction that fits the log and not the file would block every checkpoint.
                os.posix_fallocate(self._file, 0, os.fstat(self._file).st_size + RESERVE_BYTES)
                self._db.execute("INSERT INTO spare VALUES (zeroblob(?))", (RESERVE_BYTES,))
                self._db.execute("DELETE FROM spare")
                self._db.execute("PRAGMA wal_checkpoint")
            except OSError as error:
                return str(error)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode not in NO_SPACE:
                    raise
                return str(error)
            self._look_at_space()
        return None

    def is_in_place(self) -> bool:
        """False: moved, removed or unmounted, so a successor would not find it."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file))
        except OSError:
            return False

    def close(self) -> None:
        if self._file >= 0:
            self._db.close()
            os.close(self._file)
            self._file = -1

    def _create(self) -> None:
        """Put an empty, complete file in place. Raises FileExistsError if there is one by now."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        aside = self._path.with_suffix(f".{os.getpid()}")
        try:
            with closing(sqlite3.connect(aside)) as new:
                new.executescript(TABLES)
            # sqlite would apply a leftover log to this file.
            Path(f"{self._path}-wal").unlink(missing_ok=True)
            os.link(aside, self._path)
        finally:
            aside.unlink(missing_ok=True)
        sync(self._path.parent)

    def _open(self, lock_wait_s: float) -> None:
        if not self._path.stat().st_size:  # sqlite would treat it as new
            raise JournalError(f"{self._path} is empty; restore the fleet's decisions")
        uri = f"file:{quote(str(self._path.absolute()))}?mode=rw"
        db = sqlite3.connect(
            uri, uri=True, timeout=lock_wait_s, isolation_level=None, check_same_thread=False
        )
        try:
            db.execute("PRAGMA locking_mode=EXCLUSIVE")
            (schema,) = db.execute("PRAGMA user_version").fetchone()  # takes the lock
            if schema != SCHEMA:
                raise JournalError(
                    f"{self._path}: expected schema {SCHEMA}, found {schema}; it was written by another "
                    "version of Slipstream: move it and the store away to start from the first checkpoint"
                )
            (problem,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if problem != "ok":
                raise JournalError(f"{self._path} is damaged: {problem}")
            db.execute("PRAGMA synchronous=FULL")
            db.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
            self._read(db)
        except BaseException:  # no one else can close it
            db.close()
            raise
        self._db = db
        # Opened after the lock, closed after the connection: closing any descriptor of a file drops the
        # process's locks on it.
        self._file = os.open(self._path, os.O_RDWR)
        self._look_at_space()

    def _read(self, db: sqlite3.Connection) -> None:
        self.recovered: list[Decision] = []
        self._lasting, self._last = Lasting(), 0
        for number, text in db.execute("SELECT number, decision FROM decisions ORDER BY number"):
            try:
                decision = decode(text)
            except ValueError as error:
                raise JournalError(
                    f"{self._path}, row {number}: expected a decision, got {text!r:.200}: {error}"
                ) from error
            self.recovered.append(decision)
            self._lasting.add(number, decision)
            self._last = number

    def _look_at_space(self) -> None:
        if not self.is_in_place():
            self.has_space = False
            return
        pages, spare, page_bytes = (
            self._db.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        free_bytes = os.fstat(self._file).st_size - (pages - spare) * page_bytes
        log_bytes = os.stat(f"{self._path}-wal").st_size
        self.has_space = free_bytes >= RESERVE_BYTES // 2 and log_bytes >= RESERVE_BYTES

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except JournalError:
            raise
        except (OSError, sqlite3.Error) as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
                raise JournalError(
                    f"{self._path}: another controller uses it; stop that fleet, or give this one a "
                    f"'state_dir' of its own ('fuser {self._path}' names the process)"
                ) from error
            raise JournalError(
                f"{self._path}: expected a file of decisions that can be read and written, got: {error}"
            ) from error
