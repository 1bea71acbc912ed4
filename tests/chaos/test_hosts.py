"""A host that is cut off or killed in each phase of a round: a fault like any other.

The publisher and the recorder are on this machine, outside the hosts; controller and router on the first one.
"""

import json
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import psutil
import pytest

from benchmarks.hosts import DASHBOARD_PORT, Host, Hosts, NotPossible
from tests.chaos.arena import Arena, checked_since, under_load
from tests.chaos.faults import Action, Case, Phase
from tests.chaos.launching import COMMON, MARK, Launched
from tests.chaos.marked_weights import save_marked
from tests.chaos.striking import in_phase
from tests.chaos.timing import LOST
from tests.fleet.cluster import PORT, STATE, TOKEN, served
from tests.fleet.processes import engine_of
from tests.waiting import until

COUNT = 3
CUT_S = 8.0  # the fleet waits for longer
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.serve,
    pytest.mark.fleet("chaos-hosts"),
    pytest.mark.long,
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Arena, Hosts]]:
    root = tmp_path_factory.mktemp("chaos-hosts")
    with ExitStack() as stack:
        try:
            made = stack.enter_context(Hosts.made(COUNT, [root]))
        except NotPossible as error:
            pytest.skip(str(error))
        mark, model = uuid.uuid4().hex, save_marked(root / "model", 0)
        on_first = ("controller", "trainer", "router")
        cluster = stack.enter_context(served(made, root, model, COMMON, on_first, **{MARK: mark}))
        first = made[0]
        launched = Launched(
            url=f"http://x:{TOKEN}@{first.address}:{PORT}",
            dashboard=f"http://{first.address}:{DASHBOARD_PORT}",
            mark=mark,
            state=first.tmp / STATE.relative_to("/tmp"),
            output=root / "output",
            document={},
            model=cluster.fleet.checkpoint,
            own_disk=False,
            token=TOKEN,
        )
        outside = f"{first.address.rpartition('.')[0]}.254"
        options = {"replicas": COUNT, "addresses": [outside]}
        yield stack.enter_context(under_load(launched, root / "seen.jsonl", **options)), made


def replicas_on(arena: Arena, host: Host) -> list[psutil.Process]:
    there = psutil.Process(host.pid).children(recursive=True)
    return [each for each in arena.launched.named("replica") if each in there]


def strike(arena: Arena, phase: Phase, hit: Callable[[], object], brake_on: Host) -> float:
    """Do it in this phase, which a replica of another host holds; returns when."""
    with arena.quiet():
        until(arena.whole, 60, "a whole fleet before the fault")
        brake = replicas_on(arena, brake_on)[0]
        case = Case(targets=("host",), action=Action.CUT, phase=phase)
        with in_phase(arena, case, brake if phase is Phase.VERIFYING else engine_of(brake)):
            at = time.time()
            hit()
    return at


def checked(arena: Arena, begin: float, may_lose: int, **case: str) -> None:
    recording = checked_since(arena, begin, may_lose)
    events = [each.name for each in recording.events if each.name in LOST]
    figures = {"answers": len(recording.answers), "events": events, "s": round(time.time() - begin, 1)}
    print(json.dumps({**case, **figures}), flush=True)


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("ways", ["both ways", "one way"])
def test_a_host_that_is_cut_off_for_a_while_serves_no_older_version_and_is_not_lost(
    hosts: tuple[Arena, Hosts], ways: str, phase: Phase
) -> None:
    arena, (first, second, third) = hosts
    cut, join = (second.cut, second.join)
    if ways == "one way":
        cut, join = partial(third.mute, first), partial(third.unmute, first)
    begin = strike(arena, phase, cut, brake_on=first)
    time.sleep(CUT_S)
    join()
    time.sleep(CUT_S)  # TCP sends again at the latest after as long
    checked(arena, begin, may_lose=0, fault=f"cut {ways}", phase=phase)


@pytest.mark.parametrize("phase", [Phase.STAGING, Phase.COMMITTING])
def test_a_host_that_is_killed_takes_its_replicas_and_nothing_else(
    hosts: tuple[Arena, Hosts], phase: Phase
) -> None:
    """The last tests: one host is left."""
    arena, made = hosts
    victim = made.pop()
    taken = len(replicas_on(arena, victim))
    begin = strike(arena, phase, victim.kill, brake_on=made[0])
    checked(arena, begin, may_lose=taken, fault="kill", phase=phase)
