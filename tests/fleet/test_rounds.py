"""Rounds under a running service: what a client sees before, during and after."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.client.completions import Answer
from app.client.connection import KEPT_S
from tests.fleet import talk
from tests.fleet.deployed import Fleet
from tests.tiny_models import tiny_llama
from tests.waiting import until
from trainers.trajectory import VersionSpan

pytestmark = [pytest.mark.serve, pytest.mark.fleet("shared"), pytest.mark.timeout(600)]
REQUESTS, ROUNDS = 40, 3


def test_after_a_round_every_replica_answers_as_transformers_does(fleet: Fleet, tmp_path: Path) -> None:
    prompts = [talk.PROMPT, [40, 41, 42], list(range(10, 40))]
    other = fleet.published / "other"
    tiny_llama(55).save_pretrained(other)
    with fleet.client() as client:
        # Not a step of the trainer: one that has learned to say one token samples nothing to learn from.
        talk.succeeded(client.post("/fleet/publish", json={"path": str(other)}))
        before = [talk.complete(client, prompt, 24).token_ids for prompt in prompts]
        version = talk.train_and_publish(client)
        saved = client.post("/train/save", json={"path": str(tmp_path / "saved")}).json()
        reference = talk.Reference(Path(saved["path"]))
        expected = [reference(prompt, 24) for prompt in prompts]
        assert expected != before, "the round must change the answers, or the test shows nothing"
        for index, prompt in enumerate(prompts):
            for answer in talk.on_every_replica(client, prompt=prompt, max_tokens=24).values():
                assert answer.token_ids == expected[index]
                assert answer.weight_versions == [VersionSpan(version=version, start=0, end=24)]


def test_every_replica_proves_a_rounds_version(fleet: Fleet) -> None:
    with fleet.client() as client:
        version = talk.train_and_publish(client)

        def proof() -> dict[str, Any]:
            report = client.get("/fleet/rounds").json()["rounds"][-1]
            assert report["version"] == version
            compared = report["proof_reference"] == "trainer"
            return dict(report["proof"]) if compared and len(report["proof"]) == 2 else {}

        until(lambda: bool(proof()), 60.0, "both replicas and the trainer have scored the version")
        assert all(0 < each["mean"] <= each["worst"] < 0.05 for each in proof().values()), proof()
        assert client.get("/metrics").text.count("slipstream_proof_worst_difference{") == 2


async def _answers_during_rounds(fleet: Fleet) -> list[tuple[list[int], Answer]]:
    limits = httpx.Limits(max_connections=300, keepalive_expiry=KEPT_S)
    async with httpx.AsyncClient(base_url=fleet.url, timeout=400, limits=limits) as client:

        def publish() -> None:
            with fleet.client() as trainer:
                for index in range(ROUNDS):
                    talk.train_and_publish(trainer, sign=-1.0 if index % 2 else 1.0)

        publishing = asyncio.create_task(asyncio.to_thread(publish))

        async def keep_asking(index: int) -> list[tuple[list[int], Answer]]:
            """One request after another, so that all are running whenever a round comes."""
            prompt, answers = [10 + index % 200, 7, index % 90], []
            while not publishing.done():
                answers.append((prompt, await talk.ask(client, prompt, 160, stream=index % 2 == 0)))
            return answers

        asked = await asyncio.gather(*(keep_asking(index) for index in range(REQUESTS)))
        await publishing
        return [answer for some in asked for answer in some]


def test_requests_in_flight_do_not_notice_rounds(fleet: Fleet) -> None:
    with fleet.client() as client:
        first = talk.train_and_publish(client)
    talk.wait_for(
        talk.stored(fleet, first)
    )  # the first rounds may find every request still at its first version
    results = asyncio.run(_answers_during_rounds(fleet))
    last = fleet.version()
    assert last >= first + ROUNDS
    references: dict[int, talk.Reference] = {}
    for _, answer in results:
        assert len(answer.token_ids) == 160
        spans = answer.weight_versions
        versions = [span.version for span in spans]
        assert versions == sorted(set(versions)), "versions never go back"
        assert first <= versions[0] and versions[-1] <= last
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert spans[-1].end == 160
    talk.wait_for(talk.stored(fleet, last))  # a version that another one overtakes is not written
    written = {version for version in range(first, last + 1) if talk.stored(fleet, version).exists()}
    crossed = [result for result in results if len(result[1].weight_versions) > 1]
    checked = [each for each in crossed if {span.version for span in each[1].weight_versions} <= written]
    assert checked, f"no answer is of versions that were written: {sorted(written)}"
    for prompt, answer in checked[:12]:
        tokens, spans = answer.token_ids, answer.weight_versions
        for span in spans:
            version = span.version
            if version not in references:
                references[version] = talk.Reference(talk.wait_for(talk.stored(fleet, version)))
            begin, end = span.start, span.end
            agreeing = references[version].continues(prompt + tokens[:begin], tokens[begin:end])
            assert agreeing == end - begin, f"tokens {begin} to {end} are not version {version}'s"


def test_rolling_back_is_an_ordinary_round_to_older_weights(fleet: Fleet) -> None:
    with fleet.client() as client:
        old = talk.train_and_publish(client)
        expected = talk.complete(client, max_tokens=24).token_ids
        talk.wait_for(talk.stored(fleet, old))  # a version that another one overtakes is not written
        talk.train_and_publish(client)
        report = client.post("/fleet/rollback", json={"version": old})
        assert report.status_code == 200, report.text
        assert report.json()["version"] == old + 2
        for answer in talk.on_every_replica(client, max_tokens=24).values():
            assert answer.token_ids == expected
            assert answer.version == old + 2
