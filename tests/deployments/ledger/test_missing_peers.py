"""A collective transfer fails for all members because of one: the others name it."""

import pytest

from deployments.protocol.poll import Body, Connect, Outcome, Receive
from tests.deployments.ledger.ledger_scene import GROUP, Scene, report_of


def scene_with(body: type[Body], said: tuple[tuple[int, ...], ...]) -> Scene:
    """Replicas of two workers: ranks 1 and 2, 3 and 4, 5 and 6."""
    scene = Scene(replicas=len(said), world_size=2)
    for replica, ranks in zip(scene.replicas, said, strict=True):
        replica.outcomes[body] = Outcome.TRANSFER_FAILED
        replica.missing_ranks = ranks
    return scene


def attempt(scene: Scene, body: type[Body]) -> None:
    if body is Connect:
        call = scene.connect(GROUP)
    else:
        scene.connect(GROUP)
        call = scene.send(scene.open())
        scene.poll(4)
    assert call.error is not None


def fenced(scene: Scene) -> list[str]:
    scene.poll()
    return [replica.replica_id for replica in scene.replicas if replica.fenced is not None]


@pytest.mark.parametrize("body", [Connect, Receive])
def test_a_member_that_its_peers_miss_three_times_is_fenced_and_the_others_go_on(body: type[Body]) -> None:
    scene = scene_with(body, ((4,), (), (4,)))
    for _ in range(2):
        attempt(scene, body)
        assert fenced(scene) == []
    attempt(scene, body)
    assert fenced(scene) == ["r1"]
    times = "failed 3 times in a row and did not answer its peers"
    assert scene.replicas[1].fenced == f"{body.name}: {times}: missed by ['r0', 'r2']"
    for replica in scene.replicas:
        replica.outcomes.clear()
    scene.connect(GROUP)
    assert report_of(scene.publish()).version == 1


@pytest.mark.parametrize("said", [((0,), (0,), (0,)), ((1, 2), (3,), ()), ((), (), ())])
def test_a_missing_publisher_names_no_replica_and_nobody_names_itself(
    said: tuple[tuple[int, ...], ...],
) -> None:
    scene = scene_with(Receive, said)
    for _ in range(5):
        attempt(scene, Receive)
    assert fenced(scene) == []
