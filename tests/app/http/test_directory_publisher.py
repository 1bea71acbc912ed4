"""A directory becomes a version, over the real controller or a fake one that dies; or nothing changes."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError
from safetensors.torch import save_file

from app.http import directory_publisher
from app.http.directory_publisher import INCOMING, LOCK, DirectoryPublisher, DiskThread
from deployments.protocol.errors import (
    Conflict,
    InvalidRequest,
    RoundAborted,
    StalePublisher,
    TransferAborted,
)
from deployments.protocol.poll import Check, FilePart, Outcome, Receive
from deployments.weights.store.uploads import download, upload
from deployments.weights.store.version_writer import CommittedVersion, write_version
from deployments.weights.store.versions import Store
from deployments.weights.wire.digest import digest
from tests.app.http.fake_controller import FakeController, Handle
from tests.deployments.controller.fleet import Fleet
from tests.waiting import reached

TENSORS = {"w": torch.arange(6.0), "b": torch.ones(3)}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "root" / "model"
    path.mkdir(parents=True)
    save_file(TENSORS, path / "model.safetensors")
    return path


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    made = Fleet(tmp_path)
    await made.serve("r0", "r1")
    yield made
    await made.aclose()


def publisher_of(controller: Any, directory: Path, **options: Any) -> DirectoryPublisher:
    return DirectoryPublisher(Handle(controller), [directory.parent], part_bytes=1, **options)


def parts(fleet: Fleet, replica_id: str) -> list[FilePart]:
    payloads = [
        each.body.payload for each in fleet.replicas[replica_id].ran if isinstance(each.body, Receive)
    ]
    return [each for each in payloads if isinstance(each, FilePart)]


async def test_every_replica_is_told_what_to_read_and_which_digests_it_must_find(
    fleet: Fleet, directory: Path
) -> None:
    report = await publisher_of(fleet.controller, directory).publish(str(directory), "step-3")
    assert (report.version, report.label, report.phase) == (1, "step-3", "committed")
    assert Check.DIGESTS in report.checks
    for replica_id, replica in fleet.replicas.items():
        told = parts(fleet, replica_id)
        stated = {name: value for part in told for name, value in zip(part.names, part.digests, strict=True)}
        assert stated == {name: f"{digest(tensor):016x}" for name, tensor in TENSORS.items()}
        assert {part.path for part in told} == {str(directory / "model.safetensors")} and len(told) == 2
        assert replica.version == 1
    assert all(each.store_result is not None for each in fleet.replicas.values()), "none would keep it"
    assert (await fleet.controller.fleet()).lease is None


async def test_what_is_wrong_before_a_round_opens_none(fleet: Fleet, directory: Path) -> None:
    publisher = publisher_of(fleet.controller, directory)
    (directory / "model.safetensors").write_bytes(b"not yet")
    for path, message in (
        (str(directory), "no safetensors header"),
        (str(directory / ".." / ".."), "path: expected a directory below one of"),
        (str(directory.parent / "nothing"), "does not exist"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            await publisher.publish(path, None)
    status = await fleet.controller.fleet()
    assert (status.committed_version, status.lease) == (0, None)
    assert await fleet.controller.rounds() == []


@pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.DONE])
async def test_directory_changed_while_read_is_not_published(
    fleet: Fleet, directory: Path, outcome: Outcome
) -> None:
    for replica in fleet.replicas.values():
        replica.hangs_in.add(Receive)
    publishing = asyncio.create_task(publisher_of(fleet.controller, directory).publish(str(directory), None))
    await fleet.pending(Receive.name)
    save_file({name: tensor + 1 for name, tensor in TENSORS.items()}, directory / "model.safetensors")
    for replica in fleet.replicas.values():
        replica.outcomes[Receive] = outcome  # DONE: the router digests the next part after the change, too
        replica.hangs_in.clear()
    with pytest.raises(
        RoundAborted, match=r"model\.safetensors was changed while it was read; publish it again"
    ):
        await publishing
    status = await fleet.controller.fleet()
    assert (status.committed_version, status.lease, status.round) == (0, None, None)


@pytest.mark.parametrize("rotten", [None, 0, 1])
async def test_stored_version_is_published_only_as_it_was_written(
    fleet: Fleet, tmp_path: Path, rotten: int | None
) -> None:
    """The digests that replicas compare are of the files as they are: with those alone one that rotted is as
    good as any other."""
    store = Store(tmp_path / "root")
    directory = write_version(CommittedVersion(version=1, label=None, tensors=TENSORS), store, lambda _: None)
    file = directory / "model.safetensors"
    content = bytearray(file.read_bytes())
    publisher = publisher_of(fleet.controller, directory)
    if rotten is None:
        report = await publisher.publish(str(directory), "rollback to 1")
        assert report.version == 1 and Check.DIGESTS in report.checks
        return
    content[[-1, -4 * 6 - 1][rotten]] ^= 1  # the last byte of the file; the last before the larger tensor
    file.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"version 1 in .* is damaged: '[wb]' was written with digest"):
        await publisher.publish(str(directory), "rollback to 1")
    assert [each.phase for each in await fleet.controller.rounds()] == ["aborted"]
    assert "is damaged" in (await fleet.controller.rounds())[0].reason
    status = await fleet.controller.fleet()
    assert (status.committed_version, status.lease, status.round) == (0, None, None)
    assert [replica.version for replica in fleet.replicas.values()] == [0, 0]
    assert all(replica.fenced is None for replica in fleet.replicas.values())


async def test_one_publisher_at_a_time(fleet: Fleet, directory: Path) -> None:
    publisher = publisher_of(fleet.controller, directory)
    trainer = await fleet.controller.acquire("trainer")
    with pytest.raises(Conflict, match="'trainer' publishes"):
        await publisher.publish(str(directory), None)
    await fleet.controller.release(trainer.token)
    ends = await asyncio.gather(
        *(publisher_of(fleet.controller, directory).publish(str(directory), None) for _ in range(2)),
        return_exceptions=True,
    )
    assert sorted(type(each).__name__ for each in ends) == ["Conflict", "RoundReport"]
    assert (await fleet.controller.fleet()).committed_version == 1


async def test_client_disconnect_aborts_the_round(fleet: Fleet, directory: Path) -> None:
    for replica in fleet.replicas.values():
        replica.hangs_in.add(Receive)
    publishing = asyncio.create_task(publisher_of(fleet.controller, directory).publish(str(directory), None))
    await fleet.pending(Receive.name)
    publishing.cancel()
    await asyncio.gather(publishing, return_exceptions=True)
    assert [each.phase for each in await fleet.controller.rounds()] == ["aborted"]
    assert (await fleet.controller.fleet()).lease is None


async def test_lost_lease_asks_to_try_again(directory: Path) -> None:
    controller = FakeController()
    publisher = publisher_of(controller, directory)
    for error in (ActorDiedError(), StalePublisher("token 1 is stale: nobody holds the lease")):
        controller.fail_next["send"] = error
        with pytest.raises(TransferAborted, match=f"{directory} is not published.*try again") as raised:
            await publisher.publish(str(directory), None)
        assert raised.value.detail == {"send_again": True}
        if controller.lease is not None:
            await controller.release(controller.lease.token)
    assert (await publisher.publish(str(directory), None)).version == 4


# -- a hung disk ----------------------------------------------------------------------------------


async def test_hung_disk_is_not_waited_for() -> None:
    disk, goes = DiskThread(0.05), threading.Event()
    with pytest.raises(RoundAborted, match=r"/nfs: the disk has not answered for 0\.05 s"):
        await disk.run(goes.wait, "/nfs")
    with pytest.raises(Conflict, match="/nfs: the disk has not answered since an earlier call"):
        await disk.run(lambda: None, "/nfs")
    goes.set()
    async with asyncio.timeout(5):
        while True:
            try:
                assert await disk.run(lambda: 7, "/nfs") == 7
                return
            except Conflict:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("wrong"), RecursionError()])
async def test_disk_error_is_an_invalid_request(error: Exception) -> None:
    def read() -> None:
        raise error

    with pytest.raises(InvalidRequest):
        await DiskThread(5.0).run(read, "/nfs")


# -- a URL ----------------------------------------------------------------------------------------


@pytest.fixture
def uploaded(tmp_path: Path, directory: Path) -> str:
    return upload(directory, f"file://{tmp_path}/bucket")


async def test_what_is_at_a_url_becomes_a_version_and_no_copy_stays(
    fleet: Fleet, directory: Path, tmp_path: Path, uploaded: str
) -> None:
    urls = [f"file://{tmp_path}/bucket"]
    publisher = DirectoryPublisher(Handle(fleet.controller), [directory.parent], urls)  # type: ignore[arg-type]
    incoming = directory.parent / INCOMING
    left = incoming / "of-a-router-that-was-killed"
    left.mkdir(parents=True)
    (left / LOCK).touch()
    (unreadable := incoming / "of-an-operator" / LOCK).mkdir(parents=True)
    report = await publisher.publish(uploaded, "step-3")
    assert (report.version, report.label, report.phase) == (1, "step-3", "committed")
    for replica_id in fleet.replicas:
        stated = {
            n: d for part in parts(fleet, replica_id) for n, d in zip(part.names, part.digests, strict=True)
        }
        assert stated == {name: f"{digest(tensor):016x}" for name, tensor in TENSORS.items()}
    assert list(incoming.iterdir()) == [unreadable.parent]


async def test_a_download_whose_caller_has_left_leaves_nothing(
    directory: Path, tmp_path: Path, uploaded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock would keep all the weights in the store until the router exits."""
    begun, going_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        begun.set()
        going_on.wait(30)
        download(*arguments)

    monkeypatch.setattr(directory_publisher, "download", slow)
    urls = [f"file://{tmp_path}/bucket"]
    publishing = asyncio.create_task(
        publisher_of(FakeController(), directory, urls=urls).publish(uploaded, None)
    )
    await asyncio.to_thread(begun.wait, 30)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    going_on.set()
    await reached(lambda: not list((directory.parent / INCOMING).iterdir()))


async def test_a_url_that_cannot_be_published_opens_no_round_and_leaves_nothing(
    fleet: Fleet, directory: Path, tmp_path: Path, uploaded: str
) -> None:
    publisher = DirectoryPublisher(Handle(fleet.controller), [directory.parent])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"^path: expected a URL below one of \[\]"):
        await publisher.publish(uploaded, None)
    urls = [f"file://{tmp_path}/bucket"]
    publisher = DirectoryPublisher(Handle(fleet.controller), [directory.parent], urls)  # type: ignore[arg-type]
    (tmp_path / "bucket" / "model" / "model.safetensors").unlink()
    with pytest.raises(InvalidRequest, match=f"^{uploaded}: FileNotFoundError"):
        await publisher.publish(uploaded, None)
    assert list((directory.parent / INCOMING).iterdir()) == []
    assert await fleet.controller.rounds() == []
