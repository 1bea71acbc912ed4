"""From which version on the tensors that a version's publisher lacks are the same."""

from dataclasses import replace
from typing import Any

import pytest

from deployments.errors import FleetUnavailable
from deployments.ledger.decisions import Committed
from deployments.protocol.instructions import CatchUp, WriteVersion
from deployments.protocol.publishing import LACKING, RoundReport
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.deployments.ledger.ledger_scene import Scene, report_of
from tests.deployments.ledger.test_files import PART

TOWER: dict[str, Any] = {LACKING: ["tower.w", "tower.b"]}
TOWER_AGAIN: dict[str, Any] = {LACKING: ["tower.b", "tower.w"]}
OTHER: dict[str, Any] = {LACKING: ["tower.w"]}
ALL: dict[str, Any] = {}


def publish(scene: Scene, lacking: dict[str, Any], **options: Any) -> RoundReport:
    scene.connect(dict(lacking))
    call = scene.close(scene.receive(**options))
    scene.poll(10)
    return report_of(call)


def kept(scene: Scene, *rounds: dict[str, Any]) -> list[int | None]:
    return [publish(scene, each).kept_since for each in rounds]


def test_they_are_the_same_as_long_as_only_publishers_that_lack_the_same_publish() -> None:
    scene = Scene(replicas=1)
    assert kept(scene, TOWER, TOWER_AGAIN, TOWER) == [0, 0, 0]
    assert kept(scene, ALL, TOWER, TOWER) == [3, 4, 4]
    assert kept(scene, OTHER, OTHER, TOWER) == [6, 6, 8]


def test_a_round_of_files_has_all_tensors_whatever_the_connected_publisher_lacks() -> None:
    scene = Scene(replicas=1)
    assert kept(scene, TOWER) == [0]
    round_id = scene.open(file_bytes=16)
    scene.send(round_id, PART)
    scene.poll()
    scene.close(round_id)
    scene.poll(10)
    assert kept(scene, TOWER) == [2]


def test_a_round_that_was_aborted_changes_nothing() -> None:
    scene = Scene(replicas=1)
    assert kept(scene, TOWER) == [0]
    scene.connect(dict(ALL))
    scene.ledger.abort_round(scene.token, scene.receive(), "no", scene.now)
    scene.poll()
    assert kept(scene, TOWER) == [0]


def test_a_restarted_controller_knows_it() -> None:
    scene = Scene(replicas=1)
    assert kept(scene, ALL, TOWER) == [0, 1]
    scene.restart()
    scene.poll()
    assert kept(scene, TOWER) == [1]


def test_of_an_earlier_releases_versions_it_is_not_known() -> None:
    scene = Scene(replicas=1)
    assert kept(scene, TOWER, TOWER) == [0, 0]
    scene.journal = [
        replace(each, lacks="", kept_since=None) if isinstance(each, Committed) else each
        for each in scene.journal
    ]
    scene.restart()
    scene.poll()
    assert kept(scene, TOWER, TOWER) == [2, 2], "another publisher may have changed them up to then"


def test_the_replica_that_writes_a_version_is_told() -> None:
    scene = Scene(replicas=1)
    assert kept(scene, ALL) == [0]
    publish(scene, TOWER, persist=True)
    bodies = [each.body for each in scene.replicas[0].ran]
    assert [each.kept_since for each in bodies if isinstance(each, WriteVersion)] == [1]


def joiner_at(scene: Scene, version: int) -> FakeReplica:
    """A replica that starts with a stored version, and cannot load another one for now."""
    name = f"late-{version}"
    joiner = FakeReplica(replica_id=name, incarnation=name, version=version, hangs_in={CatchUp})
    scene.replicas.append(joiner)
    scene.poll()
    return joiner


def test_a_joiner_with_older_ones_takes_no_part_until_it_has_loaded() -> None:
    scene = Scene(replicas=1)
    assert kept(scene, TOWER, ALL, TOWER) == [0, 1, 2]
    old, new = joiner_at(scene, 1), joiner_at(scene, 2)
    report = publish(scene, TOWER)
    assert report.replicas.keys() == {"r0", "late-2"} and report.kept_since == 2
    assert (new.admitted, new.version) == (True, 4)
    assert (old.admitted, old.version) == (False, 1), "version 4 with tensors of version 1"
    report = publish(scene, ALL)
    assert report.replicas.keys() == {"r0", "late-2", "late-1"} and old.version == 5


@pytest.mark.parametrize("init_info", [{}, {"rank_offset": 1, "world_size": 3}])
def test_a_round_that_cannot_do_without_it_is_refused(init_info: dict[str, Any]) -> None:
    scene = Scene(replicas=1, min_replicas=1 if init_info else 2)
    joiner_at(scene, 0)
    for version in (1, 2):
        scene.connect({**ALL, **init_info})
        scene.close(scene.receive())
        scene.poll(10)
        assert scene.ledger.committed_version == version
    scene.replicas.pop()
    scene.ledger.lost([("late-0", "late-0")], "gone", scene.now)
    scene.poll()
    old = joiner_at(scene, 1)
    scene.connect({**TOWER, **init_info})
    with pytest.raises(FleetUnavailable, match=r"the same since version 2: .* late-1: has version 1"):
        scene.open()
    old.hangs_in.clear()
    scene.ledger.set_stored(2, "/store/v2", None, scene.now)
    scene.wait(5)
    assert old.version == 2
    scene.connect({**TOWER, **init_info})
    scene.close(scene.receive())
    scene.poll(10)
    assert scene.ledger.committed_version == old.version == 3
