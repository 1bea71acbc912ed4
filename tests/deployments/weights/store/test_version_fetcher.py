"""Versions that a host takes from a replica on another one."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.responses import JSONResponse, Response

from deployments.protocol.poll import StoredVersion
from deployments.replica.host_store import HostStore
from deployments.weights.store import version_fetcher
from deployments.weights.store.checkpoint_files import check_files
from deployments.weights.store.owner import check_owner
from deployments.weights.store.version_fetcher import VERSIONS, require_version
from deployments.weights.store.versions import MANIFEST, Store
from tests.deployments.version_holder import FLEET, TENSORS, VERSION, WEIGHTS, holder, told, write


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


async def take(answer: StoredVersion, quiet_s: float = 0.0) -> None:
    await asyncio.wait_for(asyncio.to_thread(require_version, answer, quiet_s), 30)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_fetcher, "RETRY_S", 0.01)


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

    monkeypatch.setattr(version_fetcher, "check_files", check_while_removed)
    reading = require_version(told(tmp_path, tmp_path))
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


async def test_of_two_that_take_a_version_at_once_the_first_to_end_counts(tmp_path: Path) -> None:
    """A replica and the trainer of one host; the end of one removes what the other has begun."""
    write(tmp_path / "a")

    def overtaken(name: str, body: bytes) -> bytes:
        if name == WEIGHTS and not Store(tmp_path / "b").list():
            write(tmp_path / "b")
        return body

    async with holder(Faulty(tmp_path / "a", overtaken)) as peer:
        await take(told(tmp_path / "b", tmp_path / "a", peer))
    assert Store(tmp_path / "b").list() == [VERSION] and not list((tmp_path / "b").glob(".v*"))


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


@pytest.mark.parametrize("slow", [str(VERSION), f"{VERSION}/{MANIFEST}"], ids=["the list", "a file"])
async def test_a_holder_that_sends_a_byte_at_a_time_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """It is never silent."""
    monkeypatch.setattr(version_fetcher, "FETCH_S", 0.5)
    write(tmp_path / "a")

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != VERSIONS + slow:
            await JSONResponse({MANIFEST: 1 << 20})(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b" ", "more_body": True})
            await asyncio.sleep(0.01)

    async with holder(serve) as peer:
        with pytest.raises(OSError, match=f"{slow} took longer than 0.5 s$"):
            await take(told(tmp_path / "b", tmp_path / "a", peer))


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
