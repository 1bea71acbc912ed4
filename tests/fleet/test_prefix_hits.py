import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from app.main import STATS_PERIOD_S
from tests.fleet.deployed import Fleet
from tests.fleet.scraping import by_replica, scraped
from tests.fleet.talk import complete, train_and_publish

pytestmark = [pytest.mark.serve, pytest.mark.fleet("shared"), pytest.mark.timeout(400)]

LENGTH = 512  # tokens of the beginning that a group has in common
ANSWERS = 6
UNSHARED = 64  # tokens of a prompt, at most, that are computed although they are in common: a part of a block


def prompts(group: int) -> list[list[int]]:
    begin = [5 + (group * 37 + position * (group + 3)) % 200 for position in range(LENGTH)]
    return [[*begin, 5 + answer, 7] for answer in range(ANSWERS)]


def counters(client: httpx.Client) -> tuple[float, float]:
    """Tokens that prompts had, and those of them that were found in a prefix cache, in all replicas."""
    found = scraped(client)
    queries, hits = (found[f"vllm:prefix_cache_{name}"] for name in ("queries", "hits"))
    return sum(by_replica(queries, "_total").values()), sum(by_replica(hits, "_total").values())


def sent(client: httpx.Client, asked: Sequence[Sequence[int]]) -> tuple[list[str], float, float]:
    """The replicas that answered, one after the other; tokens of the prompts, and hits."""
    before = counters(client)
    replicas = [complete(client, prompt, 4).replica for prompt in asked]
    after = counters(client)
    return replicas, after[0] - before[0], after[1] - before[1]


def test_prompts_that_begin_alike_are_computed_once(fleet: Fleet) -> None:
    with fleet.client() as client:
        time.sleep(4 * STATS_PERIOD_S)  # until the router has heard of a version that another test published
        places: set[str] = set()
        for group in range(20):  # each on a replica that is drawn
            replicas, queried, hits = sent(client, prompts(group))
            assert len(set(replicas)) == 1, "nothing else was to do"
            assert queried >= ANSWERS * (LENGTH + 2)  # what came before may be counted late
            assert hits >= (ANSWERS - 1) * (LENGTH - UNSHARED)
            places.add(replicas[0])
            if len(places) == 2:
                return
    pytest.fail("all groups are on one replica")


def test_a_group_that_comes_at_once_is_computed_once_in_each_replica_that_has_some_of_it(
    fleet: Fleet,
) -> None:
    with fleet.client() as client, ThreadPoolExecutor(ANSWERS) as threads:
        before = counters(client)
        answers = list(threads.map(lambda prompt: complete(client, prompt, 4), prompts(20)))
        after = counters(client)
    computed = len({answer.replica for answer in answers})
    assert after[1] - before[1] >= (ANSWERS - computed) * (LENGTH - UNSHARED)


def test_a_version_finds_nothing_of_another_one(fleet: Fleet) -> None:
    with fleet.client() as client:
        old = complete(client, prompts(30)[0], 4)
        version = train_and_publish(client)
        time.sleep(4 * STATS_PERIOD_S)  # until the router has heard of it
        replicas, _, hits = sent(client, prompts(30)[:1])
        assert hits == 0
        again, _, hits = sent(client, prompts(30)[1:])
        assert set(again) == set(replicas), "the beginning is where it was computed with the new weights"
        assert hits >= (ANSWERS - 1) * (LENGTH - UNSHARED)
        new = complete(client, prompts(30)[0], 4)
        assert old.newest_version < version <= new.oldest_version
