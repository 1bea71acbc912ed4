"""A machine that is taken away, with a notice or without one: a fault like any other."""

import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from app.client import calls
from app.client.connection import FleetClient
from tests.chaos.arena import Arena, checked_since, under_load
from tests.chaos.launching import SETTINGS, launch
from tests.chaos.marked_weights import save_marked
from tests.chaos.nodes import Node, second_node
from tests.chaos.timing import LOST
from tests.fleet.deployed import merged
from tests.waiting import until

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.serve,
    pytest.mark.fleet("nodes"),
    pytest.mark.long,
    pytest.mark.timeout(580),
]
REPLICAS = 3
SCALE_S = 200.0
DRAIN_S = 10.0


@pytest.fixture
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Arena, Node]]:
    """Three replicas, at least one of them on the second node."""
    root = tmp_path_factory.mktemp("nodes")
    engine = {"num_replicas": 1, "max_replicas": 4, "drain_timeout_s": DRAIN_S}
    settings, model = merged(SETTINGS, {"engine": engine}), save_marked(root / "model", 0)
    # One proxy: both nodes are this machine, and have its ports.
    with (
        launch(root, model, settings, proxy_location="HeadOnly") as launched,
        second_node(launched, root / "node") as node,
    ):
        with launched.client() as client:  # before there is load: engines start slowly beside it
            FleetClient(client).send(calls.scale(REPLICAS))
            until(lambda: client.get("/fleet").json()["size"]["running"] == REPLICAS, SCALE_S, "replicas")
        assert node.replicas(), "Serve spreads replicas over nodes"
        with under_load(launched, root / "seen.jsonl", replicas=REPLICAS) as arena:
            until(arena.whole, 120, "a whole fleet")
            yield arena, node


def ended(arena: Arena, begin: float, taken: int, **figures: Any) -> list[str]:
    """The events that tell of losses, by name, once the fleet is whole again and no promise was broken."""
    recording = checked_since(arena, begin, may_lose=taken)
    events = [each.name for each in recording.events if each.name in (*LOST, "left")]
    figures |= {
        "taken": taken,
        "answers": len(recording.answers),
        "not_whole": sum(not each.whole for each in recording.answers),
        "events": events,
    }
    print(json.dumps(figures), flush=True)
    return events


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_node_that_goes_away_takes_its_replicas_and_nothing_else(
    two_nodes: tuple[Arena, Node], number: signal.Signals
) -> None:
    arena, node = two_nodes
    taken, begin = len(node.replicas()), time.time()
    node.end(number)
    events = ended(arena, begin, taken)
    assert len(events) == taken, events


@pytest.mark.parametrize("notice_s", [300, 45], ids=["long", "short"])
def test_a_node_that_is_announced_to_end_loses_nothing(two_nodes: tuple[Arena, Node], notice_s: int) -> None:
    """With a notice longer than a replica's graceful stop Serve starts the replacement first. Else it stops
    the replica at once and in order, and the others take its requests.
    """
    arena, node = two_nodes
    taken, begin = len(node.replicas()), time.time()
    fewest = REPLICAS
    node.announce_end(notice_s)

    def empty() -> bool:
        nonlocal fewest
        if (fleet := arena.fleet()) is not None:
            fewest = min(fewest, sum(each["admitted"] for each in fleet["members"]))
        return not node.replicas()

    until(empty, SCALE_S, "an empty node")
    empty_s = time.time() - begin
    node.end(signal.SIGKILL)
    events = ended(arena, begin, taken, empty_s=round(empty_s, 1), fewest=fewest)
    assert events == ["left"] * taken, "no fence, and no loss"
    assert (fewest == REPLICAS) == (notice_s == 300), fewest
    assert empty_s < notice_s
