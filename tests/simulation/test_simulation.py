"""Schedules of the whole control plane.

`make test` runs a few, which are always the same, `make test-all` and `make chaos` many, others each time.
"""

import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator

import pytest

from tests.simulation.mutants import FEW, MUTANTS, search
from tests.simulation.schedule import Outcome, run, undisturbed

SAMPLE = 70  # schedules in `make test`: every situation is among them
BLOCK = 150  # schedules; some twenty seconds of one core
BLOCKS, MANY = 4, 84  # in `make test-all`; the others in `make chaos`
pytestmark = pytest.mark.timeout(900)  # they compute, and share their core


@pytest.fixture(scope="module", autouse=True)
def nothing_is_collected() -> Iterator[None]:
    with undisturbed():
        yield


@pytest.fixture(scope="module", autouse=True)
def other_tests_hear_serves_logger() -> Iterator[None]:
    """Schedules silence it in their process."""
    serve = logging.getLogger("ray.serve")
    level = serve.level
    yield
    serve.setLevel(level)


def check(seeds: Iterable[int]) -> None:
    for seed in seeds:
        if run(seed).problem is not None:
            pytest.fail(described(run(seed, trace=True)), pytrace=False)


def described(outcome: Outcome) -> str:
    return "\n".join([*outcome.trace[-40:], f"seed {outcome.seed}: {outcome.problem}", outcome.replay])


def fresh(count: int) -> range:
    """Seeds that no run had: a schedule that fails names its own."""
    first = random.SystemRandom().randrange(10**9)
    print(f"seeds from {first}")
    return range(first, first + count)


@pytest.mark.slow
def test_whatever_goes_wrong_the_fleet_is_never_wrong_and_recovers() -> None:
    check(range(SAMPLE))


@pytest.mark.long
@pytest.mark.parametrize(
    "block", [pytest.param(each, marks=[pytest.mark.chaos] if each >= BLOCKS else []) for each in range(MANY)]
)
def test_other_schedules(block: int) -> None:
    check(fresh(BLOCK))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_seed_is_one_schedule(seed: int) -> None:
    assert run(seed, trace=True) == run(seed, trace=True)


@pytest.mark.long
def test_a_seed_is_the_same_schedule_in_another_process() -> None:
    program = (
        "from tests.simulation.schedule import run, undisturbed\n"
        "with undisturbed():\n    print([run(seed, trace=True) for seed in range(20, 25)])"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(printed) == 1


def test_the_text_of_a_fault_is_still_in_its_module() -> None:
    for mutant in MUTANTS:
        compile(mutant.source(), mutant.name, "exec")


@pytest.mark.long
@pytest.mark.parametrize("name", [each.name for each in MUTANTS if each.situation])
def test_a_fault_that_is_put_in_is_found_in_its_situation(name: str) -> None:
    assert "seed " in search(name, FEW, 600.0)


@pytest.mark.chaos
@pytest.mark.long
@pytest.mark.parametrize("name", [each.name for each in MUTANTS if not each.situation])
def test_a_fault_that_is_put_in_is_found(name: str) -> None:
    assert "seed " in search(name, 2000, 600.0)
