"""Versions that a replica takes from another one's host."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from starlette.responses import JSONResponse, Response

from deployments.calls.http_server import HttpServer
from deployments.protocol.errors import JournalError
from deployments.protocol.poll import JoinAnswer, WriteVersion
from deployments.protocol.routing import ReplicaEndpoint
from deployments.replica import host_store
from deployments.replica.host_store import VERSIONS, HostStore, require_version
from deployments.replica.http_front import ReplicaFront
from deployments.weights.store.checkpoint_files import check_files
from deployments.weights.store.owner import check_owner, own
from deployments.weights.store.version_writer import CommittedVersion, write_version
from deployments.weights.store.versions import MANIFEST, Store
from tests.full_disk import full_disk

FLEET, VERSION = "a-fleet", 7
TENSORS = {"b": torch.arange(3 << 17, dtype=torch.float32), "a": torch.ones(5)}
WEIGHTS = "model.safetensors"


def write(
    directory: Path,
    tensors: dict[str, torch.Tensor] = TENSORS,
    version: int = VERSION,
    fleet_id: str = FLEET,
) -> Path:
    committed = CommittedVersion(version=version, label=None, fleet_id=fleet_id, tensors=tensors)
    own(directory, fleet_id)
    return write_version(committed, Store(directory), lambda made: (made / "config.json").write_text("{}"))


def told(store: Path, source: Path, *holders: ReplicaEndpoint) -> JoinAnswer:
    """What the controller says to a replica with this store of a version that was committed as in the
    source."""
    return JoinAnswer(
        version=VERSION,
        path=str(store / f"v{VERSION:08d}"),
        fleet_id=FLEET,
        digest=Store(source).manifest_of(VERSION).digest,
        holders=holders,
    )


@asynccontextmanager
async def holder(store: Any) -> AsyncIterator[ReplicaEndpoint]:
    """A replica with this store, which may be any ASGI application."""

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("not for the engine")

    front = ReplicaFront(
        engine,
        replica_id="r0",
        admit=lambda demand: asyncio.sleep(0),
        refusal=lambda: None,
        version=lambda: VERSION,
        versions=store,
    )
    server = HttpServer(front, "127.0.0.1")
    try:
        yield ReplicaEndpoint(address=server.address, key=front.key)
    finally:
        await server.close()


class Faulty:
    """A holder that serves a version until `fault` says otherwise: it may change one response."""

    def __init__(self, directory: Path, fault: Callable[[str, bytes], bytes]) -> None:
        self._inner = HostStore(directory, 3)
        self._fault = fault
        self.asked: list[tuple[str, bytes]] = []  # path, range

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        name = scope["path"].rpartition("/")[2]
        self.asked.append((name, headers.get(b"range", b"")))

        async def changed(message: Any) -> None:
            if body := message.get("body"):
                message = {**message, "body": self._fault(name, body)}
            await send(message)

        await self._inner(scope, receive, changed)


async def take(answer: JoinAnswer, quiet_s: float = 0.0) -> None:
    await asyncio.wait_for(asyncio.to_thread(require_version, answer, quiet_s), 30)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_store, "RETRY_S", 0.01)


async def test_a_host_gets_the_files_of_another_one(tmp_path: Path) -> None:
    source = write(tmp_path / "a")
    async with holder(HostStore(tmp_path / "a", 3)) as peer:
        await take(told(tmp_path / "b", tmp_path / "a", peer))
        with pytest.raises(OSError, match=r"400 Bad Request.* for url '.*/slipstream/versions/7"):
            await take(told(tmp_path / "c", tmp_path / "a", replace(peer, key="0" * 32)))
    taken = Store(tmp_path / "b").path_of(VERSION)
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    assert {path.name: path.read_bytes() for path in taken.iterdir()} == files and len(files) == 3
    check_owner(tmp_path / "b", FLEET)
    await take(told(tmp_path / "b", tmp_path / "a", peer))  # nobody serves it any more, and nobody is asked
    assert not Store(tmp_path / "c").list()


async def test_a_version_stays_while_it_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte is read: newer versions may come meanwhile."""
    write(tmp_path)

    def check_while_removed(directory: Path, *expected: Any) -> None:
        assert not Store(tmp_path).remove(VERSION)
        check_files(directory, *expected)

    monkeypatch.setattr(host_store, "check_files", check_while_removed)
    reading = require_version(JoinAnswer(version=VERSION, path=str(Store(tmp_path).path_of(VERSION))))
    assert not Store(tmp_path).remove(VERSION)
    reading.close()
    assert Store(tmp_path).remove(VERSION)


async def test_the_next_holder_continues_where_one_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.sample", lambda holders, count: holders)
    write(tmp_path / "a")
    pieces = iter(range(9))

    def cut(name: str, body: bytes) -> bytes:
        if name == WEIGHTS and next(pieces) == 1:
            raise ConnectionError("killed")
        return body

    # Its writer had the tensors in another order.
    write(tmp_path / "a2", dict(reversed(TENSORS.items())))
    second = Faulty(tmp_path / "a2", lambda name, body: body)
    async with holder(Faulty(tmp_path / "a", cut)) as one, holder(second) as other:
        await take(told(tmp_path / "b", tmp_path / "a", one, other))
    (asked,) = [asked for name, asked in second.asked if name == WEIGHTS]
    assert asked == b"bytes=1048576-", "one piece had come"


async def test_a_version_that_is_removed_while_its_weights_pass_arrives(tmp_path: Path) -> None:
    """Rounds are faster than a slow link."""
    source = write(tmp_path / "a")
    for number in range(9):
        (source / f"{number}.json").write_text("{}")

    def removed(name: str, body: bytes) -> bytes:
        if name == WEIGHTS and source.exists():
            assert Store(tmp_path / "a").remove(VERSION)
        return body

    answer = told(tmp_path / "b", tmp_path / "a")
    async with holder(Faulty(tmp_path / "a", removed)) as peer:
        await take(replace(answer, holders=(peer,)))


async def test_what_was_not_committed_is_not_taken(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "other", {"w": torch.zeros(3)})
    damaged = Faulty(tmp_path / "a", lambda name, body: body[:-1] + b"x" if name == WEIGHTS else body)
    async with holder(damaged) as bad, holder(HostStore(tmp_path / "other", 3)) as wrong:
        answer = told(tmp_path / "b", tmp_path / "a", bad, wrong)
        with pytest.raises(OSError, match="no replica gave version 7") as raised:
            await take(answer)
        assert "is damaged" in str(raised.value) and "as it was committed, with digest" in str(raised.value)
        assert not Store(tmp_path / "b").list() and not list((tmp_path / "b").glob(".v*"))
        async with holder(HostStore(tmp_path / "a", 3)) as good:
            await take(replace(answer, holders=(bad, wrong, good)), quiet_s=20.0)


async def test_what_an_operator_did_to_one_host_s_version_keeps_no_other_host_from_it(tmp_path: Path) -> None:
    good = write(tmp_path / "a")
    (good / "notes" / "old").mkdir(parents=True)
    (good / "notes" / "old" / "a.txt").write_text("why this version")
    (write(tmp_path / "emptied") / MANIFEST).unlink()
    async with (
        holder(HostStore(tmp_path / "emptied", 3)) as bad,
        holder(HostStore(tmp_path / "a", 3)) as peer,
    ):
        answer = told(tmp_path / "b", tmp_path / "a")
        with pytest.raises(OSError, match=r"expected a version's files, got \['config.json', 'model"):
            await take(replace(answer, holders=(bad,)))
        for number in range(4):  # in a random order
            await take(replace(answer, path=str(tmp_path / f"{number}" / good.name), holders=(bad, peer)))


async def test_a_version_that_is_damaged_here_is_replaced(tmp_path: Path) -> None:
    file = write(tmp_path / "b") / WEIGHTS
    write(tmp_path / "a")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="is damaged"):
        await take(told(tmp_path / "b", tmp_path / "a"))
    async with holder(HostStore(tmp_path / "a", 3)) as peer:
        await take(told(tmp_path / "b", tmp_path / "a", peer))
    await take(told(tmp_path / "b", tmp_path / "a"))


async def test_what_a_killed_replica_has_fetched_is_removed_before_the_next_attempt(tmp_path: Path) -> None:
    """Else replicas that are killed one after another fill the disk: none completes a version."""
    write(tmp_path / "a")
    left = tmp_path / "b" / f".v{VERSION:08d}.0123abcd.partial"
    left.mkdir(parents=True)
    (left / WEIGHTS).write_text("half")
    async with holder(HostStore(tmp_path / "empty", 3)) as peer:
        with Store(tmp_path / "b").writing(9) as written:
            with pytest.raises(OSError, match="404 Not Found"):
                await take(told(tmp_path / "b", tmp_path / "a", peer))
            assert [*(tmp_path / "b").glob(".v*")] == [written]


async def test_a_version_that_is_still_being_written_is_waited_for(tmp_path: Path) -> None:
    write(tmp_path / "a")
    async with holder(HostStore(tmp_path / "late", 3)) as peer:
        taking = asyncio.create_task(take(told(tmp_path / "b", tmp_path / "a", peer), quiet_s=20.0))
        await asyncio.sleep(0.05)
        assert not taking.done()
        write(tmp_path / "late")
        await taking


async def test_a_holder_names_no_file_outside_of_the_version(tmp_path: Path) -> None:
    write(tmp_path / "a")

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        named = scope["path"] == f"{VERSIONS}{VERSION}"
        await (JSONResponse({MANIFEST: 9, "../../evil": 4}) if named else Response(b"evil"))(
            scope, receive, send
        )

    async with holder(serve) as peer:
        with pytest.raises(OSError, match="expected a file of a version, got"):
            await take(told(tmp_path / "b", tmp_path / "a", peer))
    assert not (tmp_path / "evil").exists()
    async with holder(HostStore(tmp_path / "a", 3)) as peer:
        (tmp_path / "secret").write_text("no")
        with pytest.raises(OSError, match=r"no replica gave version 8: .*404 Not Found"):
            await take(replace(told(tmp_path / "b", tmp_path / "a", peer), version=8))


def test_one_replica_of_a_host_writes_and_removes(tmp_path: Path) -> None:
    store = HostStore(tmp_path / "store", 2)
    lock = store.lock(FLEET)
    assert lock is not None and store.lock(FLEET) is None
    os.close(lock)
    for version in (3, 4, 5):
        write(tmp_path / "store", {"a": torch.ones(1)}, version)
    for version in (1, 8, 9):  # copied by an operator
        write(tmp_path / "others", {"a": torch.ones(1)}, version, "another-fleet").rename(
            tmp_path / "store" / f"v{version:08d}"
        )
    lock = store.lock(FLEET)
    assert lock is not None and Store(tmp_path / "store").list() == [1, 4, 5, 8, 9]
    os.close(lock)
    with pytest.raises(JournalError, match="belongs to fleet another-fleet"):
        HostStore(tmp_path / "others", 2).lock(FLEET)


@pytest.mark.parametrize("problem", [errno.ENOENT, errno.EIO, errno.ENOLCK], ids=os.strerror)
def test_old_versions_that_cannot_be_removed_delay_no_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: int
) -> None:
    """The controller of this host was first, the disk fails, or its file system has no locks."""
    for version in (3, 4, 5, 6):
        write(tmp_path, {"a": torch.ones(1)}, version)
    error = OSError(problem, os.strerror(problem))
    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", MagicMock(side_effect=error))
        lock = HostStore(tmp_path, 2).lock(FLEET)
    assert lock is not None and Store(tmp_path).list() == [3, 4, 5, 6]
    os.close(lock)


def test_a_version_that_filled_the_disk_is_stored_all_the_same(tmp_path: Path) -> None:
    """Without a note of it: another replica finds the version itself when it writes."""
    store = HostStore(tmp_path, 3)
    wanted = WriteVersion(version=VERSION, label=None, fleet_id=FLEET, digest="d" * 32)
    lock = store.lock(FLEET)
    assert lock is not None
    with full_disk():
        store.unlock(lock, wanted)
    lock = store.lock(FLEET)
    assert lock is not None and store.find(wanted) is None
    os.close(lock)


def test_a_file_system_without_locks_has_several_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcntl.flock", MagicMock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    locks = [HostStore(tmp_path, 2).lock(FLEET) for _ in range(2)]
    assert None not in locks
    for lock in locks:
        os.close(lock or 0)


def test_the_version_that_was_written_last_is_known_to_other_replicas(tmp_path: Path) -> None:
    store = HostStore(tmp_path, 3)
    wanted = WriteVersion(version=VERSION, label=None, fleet_id=FLEET, digest="d" * 32)
    for written in (None, wanted, None):
        lock = store.lock(FLEET)
        assert lock is not None
        store.unlock(lock, written)
    lock = store.lock(FLEET)
    assert lock is not None and store.find(wanted) == str(Store(tmp_path).path(VERSION))
    for other in ({"digest": "x"}, {"fleet_id": "x"}, {"version": 77}):
        assert store.find(replace(wanted, **other)) is None  # type: ignore[arg-type]
    store.unlock(lock, replace(wanted, version=8, digest=None))
    lock = store.lock(FLEET)
    assert lock is not None and store.find(wanted) is None
    os.close(lock)
