"""Which connections survive an aborted round."""

import pytest

from deployments.protocol.errors import Conflict
from tests.deployments.ledger.ledger_scene import GROUP, SEPARATE, Scene, report_of


@pytest.mark.parametrize("sent_before", [True, False], ids=["in the middle", "before the first byte"])
def test_after_an_aborted_round_a_communicator_is_refused_until_its_publisher_connects_again(
    sent_before: bool,
) -> None:
    """The drop makes every replica leave it. vLLM's own publisher cannot know, and is told at the start."""
    scene = Scene(replicas=2)
    scene.connect(GROUP)
    round_id = scene.receive() if sent_before else scene.open()
    scene.ledger.abort_round(scene.token, round_id, "changed its mind", scene.now)
    scene.poll()
    for _ in range(2):
        with pytest.raises(
            Conflict, match=r"ended with round 1, which was aborted; connect again$"
        ) as caught:
            scene.open()
        assert caught.value.detail == {"connect_again": True}
    late = scene.start()
    scene.connect(GROUP)
    assert "connect" in late.names(), "who joined meanwhile takes part"
    assert report_of(scene.publish()).version == 1


def test_connections_that_reach_each_replica_separately_survive_an_aborted_round() -> None:
    scene = Scene(replicas=2)
    scene.connect(SEPARATE)
    scene.ledger.abort_round(scene.token, scene.receive(), "changed its mind", scene.now)
    scene.poll()
    call = scene.close(scene.receive())
    scene.poll(10)
    assert report_of(call).version == 1


def test_a_communicator_that_nothing_was_sent_over_survives_where_weights_change_in_place() -> None:
    """vLLM's engine keeps it: a drop ends nothing there."""
    scene = Scene(replicas=0)
    for _ in range(2):
        scene.start(updates_in_place=True)
    scene.connect(GROUP)
    scene.ledger.abort_round(scene.token, scene.open(), "changed its mind", scene.now)
    scene.poll()
    call = scene.close(scene.receive())
    scene.poll(10)
    assert report_of(call).version == 1
