"""One replica, more, and one again, under load with rounds back to back: no answer is lost, and no round."""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import yaml

from app.client import calls
from app.client.connection import FleetClient
from app.command.deploy import deploy
from deployments.protocol.responses import SizeStatus
from tests.chaos.arena import Arena, fleet_under_load, load
from tests.chaos.checker import Expected, check
from tests.chaos.launching import SETTINGS
from tests.chaos.recording import Happened, Reader, Recording
from tests.fleet.deployed import merged
from tests.waiting import until

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.serve,
    pytest.mark.fleet("elastic"),
    pytest.mark.long,
    pytest.mark.timeout(580),
]
MOST = 4
SCALE_S = 200.0
GROW_S = 300.0  # the load asks for one replica after the other
FAULTS = ("lost", "fence", "not_stored")


@pytest.fixture
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    engine = {"num_replicas": 2, "max_replicas": MOST}
    settings = merged(SETTINGS, {"engine": engine})
    with fleet_under_load(tmp_path_factory.mktemp("elastic"), settings) as arena:
        yield arena


@pytest.fixture
def automatic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """One replica with places for four requests, and half of them taken."""
    size = {"num_replicas": "auto", "min_replicas": 1, "max_replicas": MOST - 1, "max_num_seqs": 4}
    settings = merged(SETTINGS, {"engine": {**size, "downscale_delay_s": 5.0}})
    root = tmp_path_factory.mktemp("automatic")
    with fleet_under_load(root, settings, clients=2, replicas=1) as arena:
        yield arena


def size(arena: Arena) -> dict[str, Any]:
    fleet = arena.fleet()
    return {} if fleet is None else dict(fleet["size"])


def scale(arena: Arena, wanted: int) -> float:
    """The seconds until so many replicas serve, and no other is there."""
    begin = time.monotonic()
    with arena.launched.client() as client:
        answer: SizeStatus = FleetClient(client).send(calls.scale(wanted))
    assert answer.wanted == wanted
    until(lambda: running(arena, wanted), SCALE_S, f"{wanted} replicas")
    return time.monotonic() - begin


def running(arena: Arena, wanted: int) -> bool:
    """Whether so many replicas serve, and no other is there."""
    now = size(arena)
    return bool(now) and (now["running"], now["joining"], now["leaving"]) == (wanted, 0, 0)


def deploy_live_settings(arena: Arena) -> None:
    """Other limits of router and ledger, as `slipstream deploy` gives them: no process is replaced."""
    names = ("replica", "router", "controller", "trainer")
    before = {name: [each.pid for each in arena.launched.named(name)] for name in names}
    document = yaml.safe_load((arena.launched.output.parent / "serve.yaml").read_text())
    args = document["applications"][0]["args"]
    args["weights"] = {**args["weights"], "min_replicas": 2}
    args["router"] = {**args["router"], "max_ongoing_requests": 7000}
    file = arena.launched.output.parent / "changed.yaml"
    file.write_text(yaml.safe_dump(document))
    assert deploy(file, int(arena.launched.dashboard.rpartition(":")[2])) == 0
    until(lambda: (arena.fleet() or {}).get("min_replicas") == 2, 30, "the new limit")
    assert {name: [each.pid for each in arena.launched.named(name)] for name in names} == before


def test_one_four_one_under_load(elastic: Arena) -> None:
    scale(elastic, 1)
    begin, version = time.time(), elastic.committed()
    up_s = scale(elastic, MOST)
    assert size(elastic)["problem"] is None
    for name in ("serve_controller", "controller"):  # neither forgets how many there should be
        elastic.launched.named(name)[0].kill()
    restarted = time.time()
    until(lambda: size(elastic).get("running") == MOST, 60, "the controller's successor")
    deploy_live_settings(elastic)
    at_four = elastic.committed()
    until(lambda: elastic.committed() > at_four, 60, "a round with four")
    settled = time.time()
    down_s = scale(elastic, 1)
    recording = after_a_round_with_one(elastic, begin)
    quiet = [each for each in recording.events if each.at < restarted or each.at > settled]
    check_sizes(elastic, recording, quiet, MOST - 1, up_s=up_s, down_s=down_s, first=version)
    with elastic.launched.client() as client:
        answer = client.post("/fleet/scale", json={"replicas": MOST + 1})
    assert answer.status_code == 400 and "expected 1 to 4" in answer.json()["error"]["message"]


def test_the_load_decides_how_many_there_are(automatic: Arena) -> None:
    begin, version = time.time(), automatic.committed()
    time.sleep(10.0)
    assert running(automatic, 1), "half of the places are taken: one is enough"
    file = automatic.launched.output.parent / "more.jsonl"
    with load(automatic.launched.url, file, clients=10):
        until(lambda: running(automatic, MOST - 1), GROW_S, "three replicas")
        grown_s, at_three = time.time() - begin, automatic.committed()
        until(lambda: automatic.committed() > at_three + 1, 60, "rounds with three")
        assert running(automatic, MOST - 1)
    ended = time.time()
    until(lambda: running(automatic, 1), SCALE_S, "one replica")
    shrunk_s = time.time() - ended
    recording = after_a_round_with_one(automatic, begin)
    recording.answers += [each for each in Reader(file).read().answers if each.status]
    recording.answers.sort(key=lambda each: each.end)
    check_sizes(
        automatic, recording, recording.events, MOST - 2, up_s=grown_s, down_s=shrunk_s, first=version
    )


def after_a_round_with_one(arena: Arena, begin: float) -> Recording:
    """What was seen since `begin`, after another round."""
    before = arena.committed()
    until(lambda: arena.committed() > before, 60, "a round with one")
    time.sleep(1.0)  # for requests in flight
    return arena.recording().since(begin)


def check_sizes(
    arena: Arena,
    recording: Recording,
    quiet: Sequence[Happened],
    left: int,
    *,
    up_s: float,
    down_s: float,
    first: int,
) -> None:
    """So many replicas have left in order, no event in `quiet` tells of a fault, and no rule is broken."""
    faults = [(each.name, each.fields) for each in quiet if each.name in FAULTS]
    figures = {
        "up_s": round(up_s, 1),
        "down_s": round(down_s, 1),
        "rounds": arena.committed() - first,
        "answers": len(recording.answers),
        "not_whole": sum(not each.whole for each in recording.answers),
        "left": sum(each.name == "left" for each in recording.events),
        "aborted": sum(each.phase == "aborted" for each in recording.rounds),
        "refused": len(arena.refused),
    }
    print(json.dumps(figures), flush=True)
    assert not faults
    assert figures["left"] == left
    assert not (broken := check(recording, Expected())), "\n".join(broken[:20])
