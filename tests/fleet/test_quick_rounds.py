"""A replica that is lost while rounds follow each other comes back, and stops none of them."""

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.fleet.losing import kill_a_replica, members, wait_for_another
from tests.fleet.session_fleet import KEPT, Fleet
from tests.fleet.talk import on_every_replica

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]

EVERY_S = 1.0
LONGEST_PAUSE_S = 40.0  # two cores, on which an engine starts beside the rounds
FULL_STRENGTH_S = 300.0  # an engine start under this load; 120 s were too few beside other tests


@contextmanager
def quick_rounds(fleet: Fleet) -> Iterator[list[tuple[float, str]]]:
    """The trainer publishes every second; the list has the end of each round, and why it failed if it did."""
    ended: list[tuple[float, str]] = []
    stop = threading.Event()

    def publish() -> None:
        with fleet.client(timeout_s=300) as trainer:
            while not stop.wait(EVERY_S):
                answer = trainer.post("/train/publish", json={})
                ended.append((time.monotonic(), "" if answer.is_success else answer.text))

    publishing = threading.Thread(target=publish)
    publishing.start()
    try:
        yield ended
    finally:
        stop.set()
        publishing.join(timeout=300)


def test_a_lost_replica_comes_back_while_rounds_are_quick(fleet: Fleet) -> None:
    with fleet.client() as client:
        before = members(client)
        with quick_rounds(fleet) as ended:
            while not ended:
                time.sleep(0.1)
            version, lost_at = fleet.version(), time.monotonic()
            kill_a_replica()
            wait_for_another(client, before, timeout_s=FULL_STRENGTH_S)
            back_at = time.monotonic()
            rounds = fleet.version() - version
            print(f"full strength after {back_at - lost_at:.1f} s, and {rounds} rounds")
        assert rounds > KEPT, "the store still had what the replica was told to load: nothing is shown"
        assert [failure for _, failure in ended if failure] == []
        times = [at for at, _ in ended]
        longest = max(later - earlier for earlier, later in itertools.pairwise(times))
        print(f"the longest time without a round: {longest:.1f} s of {len(times)} rounds")
        assert longest < LONGEST_PAUSE_S
        assert {answer.version for answer in on_every_replica(client).values()} == {fleet.version()}
