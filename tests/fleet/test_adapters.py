"""LoRA adapters on real engines: a fleet of their own in the same cluster, driven as vLLM's clients do."""

import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from ray import serve
from safetensors.torch import load_file

from deployments.errors import Conflict
from tests.fleet.adapter_fleet import SLOTS, Adapted
from tests.fleet.adapter_talk import (
    COUNT,
    Merged,
    checkpoint_of_now,
    entries,
    everywhere,
    load,
    models,
    newest,
    scored,
    tokens,
    unload,
)
from tests.fleet.adapter_trainer import APPLICATION, LORA, adapter_trainer
from tests.fleet.losing import a_replica, kill_a_replica, members, process_of
from tests.fleet.session_fleet import MODEL
from tests.fleet.talk import (
    PROMPT,
    Reference,
    on_every_replica,
    succeeded,
    train_and_publish,
)
from tests.tiny_adapters import save_tiny_adapter, tiny_adapter_tensors

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]
TOLERANCE = 1e-3  # of log-probabilities, between transformers and the engine


def test_every_replica_answers_with_a_loaded_adapter_as_transformers_does(
    adapted: Adapted, client: httpx.Client
) -> None:
    base = Reference(adapted.fleet.checkpoint)(PROMPT, COUNT)
    expected = Merged(adapted.fleet.checkpoint, 11)(PROMPT, COUNT)
    assert expected != base
    succeeded(load(client, "math", adapted.save("a11", 11)))
    [listed, also] = models(client)
    assert listed == also and listed == {"math", f"math@{newest(client, 'math')}"}
    for answer in everywhere(client, "math"):
        assert tokens(answer) == expected
        assert answer["adapter"].startswith("math@") and answer["model"] == answer["adapter"]
        assert answer["weight_version"] == adapted.fleet.version()
    for answer in everywhere(client, MODEL):
        assert tokens(answer) == base and "adapter" not in answer


def test_a_version_goes_on_answering_what_began_with_it(adapted: Adapted, client: httpx.Client) -> None:
    old, new = (Merged(adapted.fleet.checkpoint, seed)(PROMPT, 400) for seed in (11, 12))
    succeeded(load(client, "run", adapted.save("a11", 11)))
    answers: list[dict[str, Any]] = []
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "temperature": 0}

    def ask() -> None:
        with adapted.fleet.client() as mine:
            whole = {**body, "model": "run", "return_token_ids": True}
            answers.append(succeeded(mine.post("/v1/completions", json=whole)).json())

    running = [threading.Thread(target=ask) for _ in range(4)]
    for thread in running:
        thread.start()
    time.sleep(0.5)
    before = len(answers)
    succeeded(load(client, "run", adapted.save("a12", 12), load_inplace=True))
    later = everywhere(client, "run", 24)
    for thread in running:
        thread.join()
    assert before == 0, "they have ended before the load: the test shows nothing"
    assert [tokens(answer) for answer in answers] == [old] * 4
    assert [tokens(answer) for answer in later] == [new[:24]] * 2
    assert len({answer["adapter"] for answer in answers} | {each["adapter"] for each in later}) == 2


def test_a_base_round_goes_on_beside_adapters(adapted: Adapted, client: httpx.Client, tmp_path: Path) -> None:
    succeeded(load(client, "math", adapted.save("a11", 11)))
    before = [tokens(answer) for answer in everywhere(client, "math")]
    for step in range(2):
        version = train_and_publish(client)
        path = str(tmp_path / f"saved-{step}")
        saved = Path(succeeded(client.post("/train/save", json={"path": path})).json()["path"])
        expected = Merged(saved, 11)(PROMPT, COUNT)
        for answer in everywhere(client, "math"):
            assert tokens(answer) == expected != before
            assert answer["choices"][0]["weight_versions"] == [{"version": version, "start": 0, "end": COUNT}]
        for answer in on_every_replica(client, max_tokens=COUNT).values():
            assert answer.token_ids == Reference(saved)(PROMPT, COUNT)
    last = client.get("/fleet/rounds").json()["rounds"][-1]
    assert last["phase"] == "committed" and not last["fenced"]


def test_more_adapters_than_an_engine_has_room_for_are_read_again_from_the_fleets_copy(
    adapted: Adapted, client: httpx.Client, tmp_path: Path
) -> None:
    base = checkpoint_of_now(adapted, client, tmp_path / "base")
    seeds = range(21, 21 + SLOTS + 2)
    for seed in seeds:
        directory = adapted.save(f"a{seed}", seed)
        succeeded(load(client, f"run-v{seed}", directory))
        adapted.save(f"a{seed}", 99)  # whatever becomes of the user's directory
    for _ in range(2):
        for seed in seeds:
            expected = Merged(base, seed)(PROMPT, 12)
            assert [tokens(each) for each in everywhere(client, f"run-v{seed}", 12)] == [expected] * 2


def test_what_is_wrong_is_an_error_of_the_caller_and_changes_nothing(
    adapted: Adapted, client: httpx.Client, tmp_path: Path
) -> None:
    outside = save_tiny_adapter(tmp_path / "outside", 1)
    of_another = adapted.save("another", 1, tensors=tiny_adapter_tensors(1, width=256))
    too_high = adapted.save("high", 1, rank=16)
    half = adapted.save("half", 1)
    file = half / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for path, status, phrase in (
        (outside, 400, "checkpoint_roots"),
        (of_another, 400, "another base model"),
        (too_high, 400, "max_lora_rank"),
        (half, 400, "bytes"),
        (adapted.root / "none", 404, "does not exist"),
    ):
        answer = load(client, "wrong", path)
        assert (answer.status_code, phrase in answer.text) == (status, True), answer.text
    assert models(client) == [set(), set()]
    assert client.get("/fleet/adapters").json()["adapters"] == []
    assert len(members(client)) == 2
    assert unload(client, "wrong").status_code == 404
    missing = client.post("/v1/completions", json={"model": "wrong", "prompt": "x", "max_tokens": 1})
    assert missing.status_code == 404


def test_many_adapters_leave_nothing_behind(adapted: Adapted, client: httpx.Client) -> None:
    took: list[float] = []
    for step in range(30):
        directory = adapted.save("step", step)
        began = time.monotonic()
        succeeded(load(client, f"many-v{step}", directory))
        took.append(time.monotonic() - began)
        if step >= 2:
            succeeded(unload(client, f"many-v{step - 2}"))
    took.sort()
    print(f"a load: median {took[15]:.3f} s, slowest {took[-1]:.3f} s")
    assert models(client)[0] == models(client)[1]
    assert {name.split("@")[0] for name in models(client)[0]} == {"many-v28", "many-v29"}
    copies = adapted.fleet.store / "adapters"
    deadline = time.monotonic() + 20
    while len(list(copies.iterdir())) > 2:
        assert time.monotonic() < deadline, sorted(copies.iterdir())
        time.sleep(0.2)


def test_what_a_trainer_publishes_is_the_next_version_of_its_adapter_on_every_replica(
    adapted: Adapted, client: httpx.Client, tmp_path: Path
) -> None:
    base, version = checkpoint_of_now(adapted, client, tmp_path / "base"), adapted.fleet.version()
    with adapter_trainer(adapted) as trainer:
        expected = {MODEL: scored(Reference(base))}
        for number in (1, 2):
            assert trainer.step(client) == number
            began = time.monotonic()
            report = trainer.publish(f"step {number}")
            print(f"a publish: {time.monotonic() - began:.3f} s, of which files {report.write_s:.3f} s")
            assert (report.name, report.version, report.label) == (LORA.name, number, f"step {number}")
            assert report.transfer_s is not None
            [status] = [each for each in entries(client) if each["digest"] == report.digest]
            assert set(status["received"]) == set(status["replicas"]) and len(status["replicas"]) == 2
            assert Path(status["path"]).is_dir(), "the store's copy, for joiners"
            saved = trainer.save(tmp_path / f"saved-{number}")
            expected[f"{LORA.name}@{number}"] = scored(Merged(base, saved))
        for one, two in itertools.combinations(expected.values(), 2):
            assert two != pytest.approx(one, abs=10 * TOLERANCE), (
                "the versions answer alike: nothing is shown"
            )
        expected[LORA.name] = expected[f"{LORA.name}@2"]
        for name, wanted in expected.items():
            for answer in everywhere(client, name, logprobs=1):
                scores = answer["choices"][0]["logprobs"]["token_logprobs"]
                assert [*tokens(answer), *scores] == pytest.approx(wanted, abs=TOLERANCE), name
        assert {answer["adapter"] for answer in everywhere(client, LORA.name)} == {f"{LORA.name}@2"}
        assert adapted.fleet.version() == version == trainer.status().version, "the base stays"

        succeeded(load(client, LORA.name, adapted.save("foreign", 11), load_inplace=True))
        with pytest.raises(Conflict, match=f"{LORA.name}@3 was not published by this fleet's trainer"):
            trainer.publish()
        succeeded(unload(client, f"{LORA.name}@3"))
        assert trainer.publish().version == 4
        newest_tokens = [int(token) for token in expected[LORA.name][:COUNT]]
        assert [tokens(answer) for answer in everywhere(client, LORA.name)] == [newest_tokens] * 2


@pytest.mark.chaos
def test_a_trainer_of_an_adapter_that_dies_goes_on_and_a_lost_controller_loses_no_publish(
    adapted: Adapted, client: httpx.Client, tmp_path: Path
) -> None:
    base = checkpoint_of_now(adapted, client, tmp_path / "base")
    with adapter_trainer(adapted) as trainer:
        before = trainer.status().step
        assert trainer.step(client) == before + 1
        trainer.publish()
        saved = load_file(trainer.save(tmp_path / "before") / "adapter_model.safetensors")
        os.kill(trainer.worker(), signal.SIGKILL)
        deadline = time.monotonic() + 120
        while True:
            try:
                status = trainer.status()
                break
            except Exception:  # Serve replaces it
                assert time.monotonic() < deadline
                time.sleep(0.5)
        assert (status.step, status.adapter) == (before + 1, LORA.name)
        again = load_file(trainer.save(tmp_path / "after") / "adapter_model.safetensors")
        assert all(torch.equal(again[name], tensor) for name, tensor in saved.items())

        trainer.step(client)
        killing = threading.Timer(0.05, process_of("controller", "adapters").kill)
        killing.start()
        report = trainer.publish()
        killing.join()
        expected = Merged(base, trainer.save(tmp_path / "last"))(PROMPT, COUNT)
        assert newest(client, LORA.name) == report.version
        assert [tokens(answer) for answer in everywhere(client, LORA.name)] == [expected] * 2
    assert process_of("controller", "adapters") and APPLICATION not in serve.status().applications


@pytest.mark.chaos
def test_a_successor_has_the_adapters_before_it_answers(
    adapted: Adapted, client: httpx.Client, tmp_path: Path
) -> None:
    base = checkpoint_of_now(adapted, client, tmp_path / "base")
    expected = Merged(base, 11)(PROMPT, COUNT)
    succeeded(load(client, "math", adapted.save("a11", 11)))
    before = members(client)
    assert a_replica("adapters")
    kill_a_replica("adapters")
    deadline = time.monotonic() + 240
    while len(now := members(client)) < 2 or now == before:
        answer = client.post(
            "/v1/completions",
            json={
                "model": "math",
                "prompt": PROMPT,
                "max_tokens": 4,
                "ignore_eos": True,
                "temperature": 0,
                "return_token_ids": True,
            },
        )
        assert tokens(succeeded(answer).json()) == expected[: len(tokens(answer.json()))]
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert [tokens(answer) for answer in everywhere(client, "math")] == [expected] * 2


@pytest.mark.chaos
def test_a_controller_that_dies_forgets_no_adapter(
    adapted: Adapted, client: httpx.Client, tmp_path: Path
) -> None:
    base = checkpoint_of_now(adapted, client, tmp_path / "base")
    expected = Merged(base, 11)(PROMPT, COUNT)
    succeeded(load(client, "math", adapted.save("a11", 11)))
    process_of("controller", "adapters").kill()
    assert [tokens(answer) for answer in everywhere(client, "math")] == [expected] * 2
    deadline = time.monotonic() + 60
    while (answer := load(client, "code", adapted.save("a12", 12))).status_code >= 500:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.5)
    succeeded(answer)
    names = {each["name"] for each in client.get("/fleet/adapters").json()["adapters"]}
    assert names == {"math", "code"}
