"""The ledger's records and the turns' tokens, in a sqlite database beside the journal.

Each call is one transaction. If it cannot be written, only this call fails, and the ledger is unchanged.
Durable after `sync`, which calls share: a step of 1,024 rollouts has thousands, and each wait for a disk
takes milliseconds. `max_gib` bounds what agents add; calls that empty a full file may use `RESERVE_PAGES`
beyond it. The journal's lock keeps other controllers away.
"""

import asyncio
import json
import math
import sqlite3
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, partialmethod
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from deployments.host.durable_files import sync
from deployments.protocol.errors import FleetUnavailable, InvalidRequest, JournalError, NotFound
from deployments.protocol.rollouts import CapturedTurn, Reward, RolloutLimits
from deployments.rollouts.rollout_ledger import KINDS, NewTurn, Rollout, RolloutLedger, Turn
from deployments.rollouts.sequences import TurnTokens, sequences
from trainers.trajectory import RoutedExperts

NAME = "captured.sqlite"
SCHEMA = 6
TABLES = f"""
PRAGMA journal_mode=WAL;
BEGIN;
CREATE TABLE fleet (fleet_id TEXT NOT NULL);
CREATE TABLE records (kind TEXT, key TEXT, record TEXT NOT NULL, PRIMARY KEY (kind, key));
CREATE TABLE tokens
    (turn TEXT PRIMARY KEY, prompt BLOB NOT NULL, sampled BLOB NOT NULL, logprobs BLOB NOT NULL,
     detail TEXT NOT NULL, routed BLOB NOT NULL);
CREATE TABLE infos (rollout TEXT PRIMARY KEY, info TEXT NOT NULL);
CREATE TABLE images (digest TEXT PRIMARY KEY, content BLOB NOT NULL);
CREATE TABLE shown (turn TEXT NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (turn, digest)) WITHOUT ROWID;
CREATE INDEX shown_by_digest ON shown (digest);
PRAGMA user_version={SCHEMA};
COMMIT;
"""

DISK_S = 60.0
RESERVE_PAGES = 1 << 14  # 64 MiB
MAX_TAKEN = 1 << 20  # no turn is recorded for half a second; some 30 MB of JSON
TAKEN_BYTES = 30  # per token; its routed experts count as further tokens

# Keeps the row's number: groups are taken in order of their begin.
PUT = "INSERT INTO records VALUES (?, ?, ?) ON CONFLICT (kind, key) DO UPDATE SET record = excluded.record"


class RolloutStore:
    """The ledger of rollouts, on disk. Has the ledger's methods; not thread-safe.

    Raises:
        JournalError: the file cannot be used, or is another fleet's.
    """

    def __init__(
        self,
        directory: Path,
        limits: RolloutLimits,
        fleet_id: str,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._clock = _steady_clock() if clock is None else clock
        self._path = directory / NAME
        self._ledger = RolloutLedger(limits)
        self._is_synced = True
        self._failure: OSError | None = None
        try:
            self._db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            # Without a shared-memory file, which would not fit on a full disk.
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            (schema,) = self._db.execute("PRAGMA user_version").fetchone()
            if schema not in (0, SCHEMA):
                raise JournalError(
                    f"{self._path}: expected schema {SCHEMA}, found {schema}; it was written by another "
                    "version of Slipstream: move the file away"
                )
            if schema == 0:  # else nothing is written: the disk may be full
                self._db.executescript(TABLES)
            self._check_fleet(fleet_id)
            (page_bytes,) = self._db.execute("PRAGMA page_size").fetchone()
            self._max_pages = int(limits.max_gib * (1 << 30) / page_bytes)
            self._db.execute("PRAGMA synchronous=NORMAL")  # `sync` waits for the disk
            for kind, record in self._db.execute("SELECT kind, record FROM records ORDER BY rowid"):
                self._ledger.load(msgspec.json.decode(record, type=KINDS[kind]))
            sync(directory)  # holds sqlite's log, which each connection makes anew
        except (sqlite3.Error, msgspec.DecodeError, KeyError, OSError) as error:
            raise JournalError(f"{self._path}: expected a file of rollouts, got: {error}") from error

    def close(self) -> None:
        self._db.close()

    def sync(self) -> None:
        """Make earlier calls durable. Raises FleetUnavailable if that fails."""
        if self._failure is not None:
            raise self._unavailable(self._failure)
        if self._is_synced:
            return
        try:
            sync(self._path.with_name(f"{NAME}-wal"))
        except OSError as error:
            self._failure = error  # a later sync would succeed without the pages that the kernel has dropped
            raise self._unavailable(error) from error
        self._is_synced = True

    def _check_fleet(self, fleet_id: str) -> None:
        """Two fleets number versions alike."""
        if (found := self._db.execute("SELECT fleet_id FROM fleet").fetchone()) is None:
            self._db.execute("INSERT INTO fleet VALUES (?)", (fleet_id,))
        elif found[0] != fleet_id:
            raise JournalError(
                f"{self._path} has rollouts of fleet {found[0]}, and this is fleet {fleet_id}: "
                "move the file away"
            )

    def _call(self, name: str, reserve_pages: int, *arguments: Any) -> Any:
        with self._transaction(reserve_pages):
            return getattr(self._ledger, name)(*arguments, self._clock())

    open = partialmethod(_call, "open", 0)
    begin = partialmethod(_call, "begin", 0)
    reward = partialmethod(_call, "reward", RESERVE_PAGES // 2)
    discard = partialmethod(_call, "discard", RESERVE_PAGES)
    position = partialmethod(_call, "position", RESERVE_PAGES)
    counts = partialmethod(_call, "counts", RESERVE_PAGES)

    def append(self, owner: str, turns: Sequence[tuple[str, CapturedTurn]]) -> None:
        """All turns or none; see `RolloutLedger.append`."""
        with self._transaction(0):
            for rollout_id, captured in turns:
                self._append(rollout_id, owner, captured)

    def _append(self, rollout_id: str, owner: str, captured: CapturedTurn) -> None:
        if not math.isfinite(sum(array("f", captured.logprobs))):
            raise InvalidRequest(
                "x-rollout-id: expected finite log-probabilities, the engine returned others"
            )
        tokens = captured.prompt_token_ids + captured.token_ids
        policy, version = _policy(captured)
        routed = captured.routed_experts

        def digest(length: int) -> str:
            shown = "".join(image.digest for image in captured.images if image.offset < length)
            made = blake2b(memoryview(tokens)[: 4 * length], digest_size=16)
            made.update(shown.encode())
            return made.hexdigest()

        new = NewTurn(
            request=captured.key,
            attempt=captured.attempt,
            prompt=len(captured.prompt_token_ids) // 4,
            sampled=len(captured.token_ids) // 4,
            policy=policy,
            version=version,
            routed_bytes=0 if routed is None else routed.position_bytes,
            digest=digest,
        )
        added = self._ledger.append(rollout_id, owner, new)
        if added is not None:
            _, turn = added
            detail: dict[str, Any] = {
                "weight_versions": captured.weight_versions,
                "adapter": captured.adapter,
                "constrained": captured.constrained,
                "finish_reason": captured.finish_reason,
                "sampling": captured.sampling,
                "images": [image.digest for image in captured.images],
            }
            known, ids = turn.length - turn.stored, b""
            if routed is not None:
                # The parent did not compute its last token: its experts are this turn's.
                ids = routed.ids[max(0, known - 1) * routed.position_bytes :]
                detail["routed"] = {"layers": routed.layers, "top_k": routed.top_k, "dtype": routed.dtype}
            prompt = captured.prompt_token_ids[4 * known :]
            row = (turn.key, prompt, captured.token_ids, captured.logprobs, json.dumps(detail), ids)
            self._db.execute("INSERT OR REPLACE INTO tokens VALUES (?, ?, ?, ?, ?, ?)", row)
            for image in captured.images:
                self._db.execute("INSERT OR IGNORE INTO images VALUES (?, ?)", (image.digest, image.content))
                self._db.execute("INSERT OR IGNORE INTO shown VALUES (?, ?)", (turn.key, image.digest))

    def image(self, digest: str) -> bytes:
        """Raises NotFound."""
        row = self._db.execute("SELECT content FROM images WHERE digest = ?", (digest,)).fetchone()
        if row is None:
            raise NotFound(f"no rollout that is kept has the image {digest!r}")
        return bytes(row[0])

    def settle(self, groups: Sequence[tuple[str, Mapping[str, tuple[Reward, str]], str]]) -> None:
        """All groups or none. See `RolloutLedger.settle`. Beside each reward: what a trainer gets with the
        rollout."""
        with self._transaction(RESERVE_PAGES // 2):
            for group, rewards, reason in groups:
                found = {key: reward for key, (reward, _) in rewards.items()}
                self._ledger.settle(group, found, reason, self._clock())
                rows = [(key, info) for key, (_, info) in rewards.items()]
                self._db.executemany("INSERT OR REPLACE INTO infos VALUES (?, ?)", rows)

    def take(
        self,
        step: str,
        run: str,
        count: int,
        max_staleness: int | None,
        offset: int,
        current: Mapping[str, int],
    ) -> bytes:
        """The JSON of a step's groups from `offset` on, up to `MAX_TAKEN` tokens; see
        `RolloutLedger.take`."""
        with self._transaction():
            taken, stale = self._ledger.take(step, run, count, max_staleness, current, self._clock())
            names = () if taken is None else taken.groups[offset:]
            groups: list[dict[str, object]] = []
            tokens = 0
            for name in names:
                if tokens >= MAX_TAKEN:
                    break
                rollouts = self._ledger.rewarded(name)
                tokens += sum(each.tokens * (1 + each.routed_bytes // TAKEN_BYTES) for each in rollouts)
                groups.append({"group": name, "rollouts": [self._rollout(each) for each in rollouts]})
            _, _, ready = self._ledger.position(run, self._clock())
        found = {
            "step": None if taken is None else step,
            "stale_groups": stale,
            "ready_groups": ready,
            "groups": groups,
            "left_groups": len(names) - len(groups),
        }
        return msgspec.json.encode(found)

    def _rollout(self, rollout: Rollout) -> msgspec.Raw:
        """JSON, one at a time: encoding holds the interpreter lock, and lists are larger than text."""
        turns = [self._turn(f"{rollout.key}/{number}") for number in range(rollout.turns)]
        row = self._db.execute("SELECT info FROM infos WHERE rollout = ?", (rollout.key,)).fetchone()
        info = "" if row is None else row[0]
        found = {"id": rollout.key, "reward": rollout.reward, "info": info, "sequences": sequences(turns)}
        return msgspec.Raw(msgspec.json.encode(found))

    def _turn(self, key: str) -> TurnTokens:
        record, *blobs, ids, detail = self._db.execute(
            "SELECT record, prompt, sampled, logprobs, routed, detail FROM records JOIN tokens ON turn = key "
            "WHERE kind = ? AND key = ?",
            (Turn.KIND, key),
        ).fetchone()
        prompt, sampled, logprobs = (array(c, blob) for c, blob in zip("iif", blobs, strict=True))
        parent = msgspec.json.decode(record, type=Turn).parent
        fields = json.loads(detail)
        if (routed := fields.pop("routed", None)) is not None:
            fields["routed_experts"] = RoutedExperts(**routed, ids=ids)
        return TurnTokens(parent=parent, prompt=prompt, sampled=sampled, logprobs=logprobs, **fields)

    @contextmanager
    def _transaction(self, reserve_pages: int = RESERVE_PAGES) -> Iterator[None]:
        """Raises FleetUnavailable: unwritable; the ledger is unchanged."""
        if self._failure is not None:
            raise self._unavailable(self._failure)
        try:
            self._db.execute(f"PRAGMA max_page_count={self._max_pages + reserve_pages}")
            self._db.execute("BEGIN IMMEDIATE")
            before = self._db.total_changes
            yield
            changes = self._ledger.changes()
            put = [
                (kind, key, msgspec.json.encode(record).decode())
                for (kind, key), record in changes.items()
                if record is not None
            ]
            gone = [(kind, key) for (kind, key), record in changes.items() if record is None]
            turns = [(key,) for kind, key in gone if kind == Turn.KIND]
            rollouts = [(key,) for kind, key in gone if kind == Rollout.KIND]
            self._db.executemany("DELETE FROM records WHERE kind = ? AND key = ?", gone)
            self._db.executemany("DELETE FROM tokens WHERE turn = ?", turns)
            self._db.executemany("DELETE FROM infos WHERE rollout = ?", rollouts)
            self._forget_images(turns)
            self._db.executemany(PUT, put)
            self._db.execute("COMMIT")
            self._is_synced = self._is_synced and self._db.total_changes == before
            self._ledger.saved()
        except BaseException as error:  # includes the ledger's errors
            self._ledger.undo()
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise self._unavailable(error) from error
            raise

    def _forget_images(self, turns: Sequence[tuple[str]]) -> None:
        """Images that only these turns have shown."""
        for turn in turns:
            shown = self._db.execute("SELECT digest FROM shown WHERE turn = ?", turn).fetchall()
            self._db.execute("DELETE FROM shown WHERE turn = ?", turn)
            self._db.executemany(
                "DELETE FROM images WHERE digest = ?1 AND NOT EXISTS (SELECT 1 FROM shown WHERE digest = ?1)",
                shown,
            )

    def _unavailable(self, error: Exception) -> FleetUnavailable:
        until = "" if self._failure is None else " until the controller is started again"
        return FleetUnavailable(
            f"rollouts cannot be recorded in {self._path}{until}: {error}. Requests without 'x-rollout-id' "
            "are served",
            {"disk": str(error)},
        )


def _policy(captured: CapturedTurn) -> tuple[str, int]:
    if captured.adapter is not None:
        name, _, version = captured.adapter.rpartition("@")
        return name, int(version)
    if not captured.weight_versions:
        raise InvalidRequest("x-rollout-id: the engine named no weight version of this answer")
    return "", min(version for version, _, _ in captured.weight_versions)


def _steady_clock() -> Callable[[], float]:
    """Seconds since 1970. A step of the host's clock would end groups, or never end them."""
    began = time.time() - time.monotonic()
    return lambda: began + time.monotonic()


class Rollouts:
    """The store in its own thread: a slow disk delays neither decisions nor polls. Raises JournalError: the
    file cannot be used. `limits` None: no rollout is captured."""

    def __init__(self, directory: Path, limits: RolloutLimits | None, fleet_id: str) -> None:
        self._store = None if limits is None else RolloutStore(directory, limits, fleet_id)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts")

    async def call(self, name: str, current: Mapping[str, int], *arguments: Any) -> Any:
        """A method of `RolloutStore`, whose changes are on the disk; the JSON of `take` is bytes.

        Args:
            current: versions by policy.

        Raises:
            InvalidRequest: rollouts are off.
            FleetUnavailable: the disk hangs or is full. The call may be sent again.
        """
        if self._store is None:
            raise InvalidRequest(
                "this fleet captures no rollouts: expected the section 'rollouts' in its settings, got none"
            )
        if name == "take":
            arguments = (*arguments, current)
        work = partial(getattr(self._store, name), *arguments)
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._thread, work)
        try:
            async with asyncio.timeout(DISK_S):
                answer = await asyncio.shield(done)
                await loop.run_in_executor(self._thread, self._store.sync)  # after all that wait by now
                return answer
        except TimeoutError:
            done.cancel()
            raise FleetUnavailable(f"the disk of the rollouts has not answered for {DISK_S:g} s") from None

    async def aclose(self) -> None:
        if self._store is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        self._thread.shutdown(wait=False)
