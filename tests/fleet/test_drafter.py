"""A fleet whose trainer trains the EAGLE-3 head that its engines draft with."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from app.client import calls
from app.client.connection import FleetClient
from tests.fleet.deployed import Fleet, deployed
from tests.fleet.keeping import KEEPER
from tests.fleet.losing import a_replica, kill_a_replica, members, wait_for_another
from tests.fleet.talk import (
    PROMPT,
    Reference,
    complete,
    on_every_replica,
    served_checkpoint,
    succeeded,
    trainer_publishes,
)
from tests.tiny_models import save_tiny_llama

pytestmark = [pytest.mark.serve, pytest.mark.fleet("drafted"), pytest.mark.long, pytest.mark.timeout(600)]
TOKENS = 24


@pytest.fixture
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return KEEPER.fleet("drafted", tmp_path_factory, _start)


def _start(root: Path) -> AbstractContextManager[Fleet]:
    from trainers.eagle3 import write_new_head

    model, head = save_tiny_llama(root / "model", seed=1, layers=4), root / "head"
    write_new_head(model, head)
    changes = {
        "engine": {
            "extra": {
                "speculative_config": {"method": "eagle3", "model": str(head), "num_speculative_tokens": 1}
            }
        },
        "trainer": {"drafter": {"model": str(head), "learning_rate": 0.01}},
    }
    return deployed("drafted", model, root, changes)


def greedy(client: httpx.Client, checkpoint: Path) -> Mapping[str, float]:
    """By replica: the share of drafted tokens that were accepted in its answers, which are the
    checkpoint's."""
    answers = on_every_replica(client, max_tokens=TOKENS)
    expected = Reference(checkpoint)(PROMPT, TOKENS)
    assert all(answer.token_ids == expected for answer in answers.values())
    loads = FleetClient(client).send(calls.load()).replicas
    assert loads.keys() == answers.keys()
    return {name: each.accepted_tokens / each.drafted_tokens for name, each in loads.items()}


def train(client: httpx.Client, steps: int, **settings: float) -> None:
    """Steps on the answers of the policy: the drafter learns to propose them."""
    batch = [
        complete(client, prompt, TOKENS, logprobs=1).trajectory(prompt, advantage=1.0)
        for prompt in (PROMPT, [40, 41, 42])
    ]
    for _ in range(steps):
        FleetClient(client).send(calls.step(batch, json.dumps(settings)))


def test_the_policy_and_the_head_that_is_trained_with_it_are_swapped_together(drafted: Fleet) -> None:
    with drafted.client() as client:
        untrained = greedy(client, drafted.checkpoint)
        assert client.get("/fleet").json()["drafter"] is None
        train(client, 1)
        succeeded(trainer_publishes(client))
        assert complete(client, max_tokens=TOKENS).token_ids != Reference(drafted.checkpoint)(PROMPT, TOKENS)
        train(client, 30, learning_rate=1e-6)
        report = succeeded(trainer_publishes(client)).json()
        assert (report["version"], report["drafter"]) == (2, 2) and len(report["replicas"]) == 2
        fleet = client.get("/fleet").json()
        assert (fleet["committed_version"], fleet["drafter"]) == (2, 2)
        version = served_checkpoint(drafted)
        trained = greedy(client, version)
        assert min(trained.values()) > max(0.5, *untrained.values()), (untrained, trained)
        before = members(client)
        kill_a_replica(a_replica(drafted))
        wait_for_another(client, before)
        assert set(greedy(client, version).values()) == set(trained.values()), "an engine that loads both"
