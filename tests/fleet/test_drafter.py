"""Fleets that draft: with an EAGLE-3 head that their trainer trains, and with what their checkpoint has."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from app.client import calls
from app.client.connection import FleetClient
from tests.documents import ROOT
from tests.fleet import talk
from tests.fleet.deployed import Fleet, deployed
from tests.fleet.keeping import KEEPER
from tests.fleet.losing import a_replica, kill_a_replica, members, wait_for_another
from tests.tiny_models import (
    save_agreeing_mtp,
    save_tiny_llama,
    save_tiny_mtp,
    save_tiny_vision_language,
)

pytestmark = [pytest.mark.serve, pytest.mark.long, pytest.mark.timeout(600)]
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
    answers = talk.on_every_replica(client, max_tokens=TOKENS)
    expected = talk.Reference(checkpoint)(talk.PROMPT, TOKENS)
    assert all(answer.token_ids == expected for answer in answers.values())
    loads = FleetClient(client).send(calls.load()).replicas
    assert loads.keys() == answers.keys()
    return {name: each.accepted_tokens / each.drafted_tokens for name, each in loads.items()}


def drafting_is_off(client: httpx.Client) -> set[bool]:
    """Of the replicas."""
    return {each.drafting_off for each in FleetClient(client).send(calls.load()).replicas.values()}


def train(client: httpx.Client, steps: int, **settings: float) -> None:
    """Steps on the answers of the policy: the drafter learns to propose them."""
    batch = [
        talk.complete(client, prompt, TOKENS, logprobs=1).trajectory(prompt, advantage=1.0)
        for prompt in (talk.PROMPT, [40, 41, 42])
    ]
    for _ in range(steps):
        FleetClient(client).send(calls.step(batch, json.dumps(settings)))


@pytest.mark.fleet("drafted")
def test_the_policy_and_the_head_that_is_trained_with_it_are_swapped_together(drafted: Fleet) -> None:
    with drafted.client() as client:
        untrained = greedy(client, drafted.checkpoint)
        assert client.get("/fleet").json()["drafter"] is None
        train(client, 1)
        talk.succeeded(talk.trainer_publishes(client))
        assert talk.complete(client, max_tokens=TOKENS).token_ids != talk.Reference(drafted.checkpoint)(
            talk.PROMPT, TOKENS
        )
        train(client, 30, learning_rate=1e-6)
        report = talk.succeeded(talk.trainer_publishes(client)).json()
        assert (report["version"], report["drafter"]) == (2, 2) and len(report["replicas"]) == 2
        fleet = client.get("/fleet").json()
        assert (fleet["committed_version"], fleet["drafter"]) == (2, 2)
        version = talk.served_checkpoint(drafted)
        trained = greedy(client, version)
        assert min(trained.values()) > max(0.5, *untrained.values()), (untrained, trained)
        before = members(client)
        kill_a_replica(a_replica(drafted))
        wait_for_another(client, before)
        assert set(greedy(client, version).values()) == set(trained.values()), "an engine that loads both"


@pytest.fixture
def multi_token(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return KEEPER.fleet("multi_token", tmp_path_factory, _start_multi_token)


def _start_multi_token(root: Path) -> AbstractContextManager[Fleet]:
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    changes = {
        "engine": {"min_draft_acceptance": 0.5, "extra": {"speculative_config": drafts}},
        "security": {"checkpoint_roots": [str(root / "published")]},
        "trainer": {"drafter": {"learning_rate": 0.01}},
    }
    return deployed("multi_token", save_tiny_mtp(root / "model", 0), root, changes)


@pytest.mark.fleet("multi_token")
def test_multi_token_prediction_is_a_part_of_the_version_or_stays_as_it_was(multi_token: Fleet) -> None:
    """What drafts in the published checkpoint drafts what the policy says, also of a later one."""
    fleet = multi_token
    whole = save_agreeing_mtp(fleet.published / "whole", 1)
    alone = save_agreeing_mtp(fleet.published / "alone", 2, drafter=False)
    with fleet.client() as client:
        assert max(greedy(client, fleet.checkpoint).values()) < 0.5
        many = {**talk.body(talk.PROMPT, TOKENS), "prompt": [talk.PROMPT] * 120}
        talk.succeeded(client.post("/v1/completions", json=many))
        assert drafting_is_off(client) == {True}
        greedy(client, fleet.checkpoint)
        for directory, version in ((whole, 1), (alone, 2)):
            report = FleetClient(client).send(calls.publish_directory(str(directory)))
            assert (report.version, report.drafter, len(report.replicas)) == (version, 1, 2)
            assert set(greedy(client, directory).values()) == {1.0}
            assert drafting_is_off(client) == {False}
            counted = rf'slipstream_accepted_draft_tokens_total{{[^}}]*version="{version}"[^}}]*}} [1-9]'
            assert len(re.findall(counted, client.get("/metrics").text)) == 2
        assert client.get("/fleet").json()["drafter"] == 1
        stored = talk.served_checkpoint(fleet)
        before = members(client)
        kill_a_replica(a_replica(fleet))
        wait_for_another(client, before)
        assert set(greedy(client, stored).values()) == {1.0}, "an engine that loads both"
        train(client, 1)
        report = talk.succeeded(talk.trainer_publishes(client)).json()
        assert (report["version"], report["drafter"]) == (3, 3), "its own checkpoint's"
        assert max(greedy(client, talk.served_checkpoint(fleet)).values()) < 0.5
        train(client, 60, learning_rate=1e-9)
        talk.succeeded(talk.trainer_publishes(client))
        assert min(greedy(client, talk.served_checkpoint(fleet)).values()) > 0.5, "it has learned"


@pytest.fixture
def multi_token_trained(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Its processes have what Qwen's models import of torchvision."""
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests' / 'without_torchvision'}:{ROOT}:{path}")
    return KEEPER.fleet("multi_token_trained", tmp_path_factory, _start_multi_token_trained)


def _start_multi_token_trained(root: Path) -> AbstractContextManager[Fleet]:
    # vLLM's linear attention on a CPU is for bfloat16 and this width, and cannot draft with a prefix cache.
    model = save_tiny_vision_language(root / "model", 0, linear_key_head_dim=128, linear_value_head_dim=128)
    extra = {
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
        "limit_mm_per_prompt": {"image": 0, "video": 0},
        "enable_prefix_caching": False,
    }
    changes = {
        "engine": {"dtype": "bfloat16", "num_replicas": 1, "extra": extra},
        "trainer": {"drafter": {"learning_rate": 0.01}},
    }
    return deployed("multi_token_trained", model, root, changes)


@pytest.mark.fleet("multi_token_trained")
def test_multi_token_prediction_that_is_trained_drafts_what_the_policy_says(
    multi_token_trained: Fleet,
) -> None:
    def drafted(client: httpx.Client) -> tuple[Sequence[int], float]:
        answer = talk.complete(client, max_tokens=TOKENS)
        (load,) = FleetClient(client).send(calls.load()).replicas.values()
        return answer.token_ids, load.accepted_tokens / load.drafted_tokens

    with multi_token_trained.client() as client:
        answer, untrained = drafted(client)
        train(client, 60, learning_rate=1e-9)
        assert talk.succeeded(talk.trainer_publishes(client)).json()["drafter"] == 1
        again, trained = drafted(client)
        assert again == answer, "the policy is what it was"
        assert trained > max(0.5, untrained), (untrained, trained)
