"""A publisher whose model lacks tensors of the checkpoint, and weights that a sleep discards."""

import pytest

from deployments.errors import Conflict
from deployments.protocol.publishing import LACKING
from tests.deployments.ledger.ledger_scene import Scene

PARTIAL = {LACKING: ["model.visual.proj.weight", "mtp.fc.weight"]}


def test_weights_that_no_round_would_bring_back_are_not_discarded() -> None:
    scene = Scene(replicas=1)
    scene.connect(dict(PARTIAL))
    with pytest.raises(Conflict, match="lacks 2 of the checkpoint's tensors, and no round brings them back"):
        scene.call("sleep 2")
    assert scene.call("sleep 1").error is None
    assert scene.call("wake_up").error is None
    scene.close(scene.receive())
    scene.poll(8)
    assert scene.ledger.committed_version == 1


def test_no_round_that_lacks_tensors_counts_as_a_replacement_of_discarded_weights() -> None:
    scene = Scene(replicas=1)
    scene.connect()
    scene.call("sleep 2")
    scene.call("wake_up weights")
    scene.connect(dict(PARTIAL))
    with pytest.raises(Conflict, match="replicas that have lost them must be restarted"):
        scene.open()
    scene.connect()  # a publisher of all tensors
    scene.close(scene.receive())
    scene.poll(8)
    assert scene.call("wake_up kv_cache").error is None
