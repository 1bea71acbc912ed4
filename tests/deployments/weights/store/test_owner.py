import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deployments.protocol.errors import JournalError
from deployments.weights.store.owner import OWNER, check_owner, claim, has_owner, hold
from deployments.weights.store.versions import Store
from tests.full_disk import full_disk

OURS, STATE = "ours", Path("/state")


def test_of_fleets_that_claim_a_store_at_once_one_succeeds(tmp_path: Path) -> None:
    def tried(fleet_id: str) -> bool:
        try:
            claim(tmp_path / "store", fleet_id, STATE)
        except JournalError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        ids = [f"fleet-{number}" for number in range(8)]
        won = [each for each, succeeded in zip(ids, threads.map(tried, ids), strict=True) if succeeded]
    assert won == [json.loads((tmp_path / "store" / OWNER).read_text())["fleet_id"]]


def test_its_fleet_claims_it_again_and_another_is_told_both_ids_and_what_to_do(tmp_path: Path) -> None:
    assert not has_owner(tmp_path, OURS)
    with pytest.raises(JournalError, match=rf"fleet.json is not there, and this is fleet {OURS}'s store"):
        check_owner(tmp_path, OURS)
    for _ in range(2):
        claim(tmp_path, OURS, STATE)
    assert has_owner(tmp_path, OURS)
    for refused in (lambda: claim(tmp_path, "theirs", STATE), lambda: check_owner(tmp_path, "theirs")):
        with pytest.raises(
            JournalError,
            match=r"belongs to fleet ours \(its 'state_dir' is /state on .*\), and this is fleet theirs: set "
            "'store.path' to another directory, move this one away",
        ):
            refused()


def test_of_two_processes_one_holds_the_claim(tmp_path: Path) -> None:
    claim(tmp_path, OURS, STATE)
    held = hold(tmp_path)
    with pytest.raises(JournalError, match="is used by another controller of the same fleet"):
        hold(tmp_path)
    os.close(held)
    os.close(hold(tmp_path))


def test_nobody_sees_a_claim_that_a_crash_could_leave_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, fsync = list[bool](), os.fsync

    def synced(descriptor: int) -> None:
        seen.append(has_owner(tmp_path, OURS))
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", synced)
    claim(tmp_path, OURS, STATE)
    assert seen == [False, True], "before its content is on the disk, and before its name is"


def test_a_file_system_without_hard_links_has_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", link)
    claim(tmp_path, OURS, STATE)
    with pytest.raises(JournalError, match="belongs to fleet ours"):
        claim(tmp_path, "theirs", STATE)
    assert [each.name for each in tmp_path.iterdir()] == [OWNER]


def test_a_full_disk_is_an_error_and_leaves_no_claim(tmp_path: Path) -> None:
    with (
        full_disk(),
        pytest.raises(JournalError, match=r"cannot be claimed for fleet ours: .*File too large"),
    ):
        claim(tmp_path, OURS, STATE)
    claim(tmp_path, "theirs", STATE)


def test_a_file_in_its_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    for refused in (
        lambda: claim(tmp_path / "store", OURS, STATE),
        lambda: check_owner(tmp_path / "store", OURS),
    ):
        with pytest.raises(JournalError, match=r"store cannot be used: .*Not a directory"):
            refused()


@pytest.mark.parametrize("text", ["", "{}", '{"fleet_id": 3}', "[]", "\xff"])
def test_a_damaged_claim_is_nobodys(tmp_path: Path, text: str) -> None:
    (tmp_path / OWNER).write_text(text, encoding="latin-1")
    with pytest.raises(JournalError, match=r"expected the id of the fleet .* remove the file if no other"):
        check_owner(tmp_path, OURS)


def test_nothing_is_written_into_the_store_of_another_fleet(tmp_path: Path) -> None:
    claim(tmp_path, "theirs", STATE)
    with pytest.raises(JournalError, match="belongs to fleet theirs"), Store(tmp_path).writing(1, OURS):
        pass
    assert [each.name for each in tmp_path.iterdir()] == [OWNER]
