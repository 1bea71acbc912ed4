"""The control calls of prime-rl, SkyRL and ART, which pin other versions, as their sources make them.

prime-rl: `src/prime_rl/utils/client.py`. SkyRL: `inference_servers/remote_inference_client.py`, which reads
the body of an answer only if it has a length. ART 0.5.18: `art/unsloth/service.py`.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.fleet.adapter_fleet import Adapted
from tests.fleet.adapter_talk import COUNT, Merged, everywhere, tokens, unload
from tests.fleet.deployed import MODEL, Fleet
from tests.fleet.talk import PROMPT, Reference, on_every_replica, served_checkpoint, succeeded
from tests.tiny_models import tiny_llama

pytestmark = [pytest.mark.clients, pytest.mark.serve, pytest.mark.fleet("shared"), pytest.mark.timeout(600)]
ADAPTERS = pytest.mark.fleet("gloo")


# -- prime-rl --------------------------------------------------------------------------------------


def test_prime_rl_updates_from_a_directory_within_a_pause(fleet: Fleet) -> None:
    directory = fleet.published / "step_7"
    tiny_llama(71).save_pretrained(directory)
    (directory / "NCCL_READY").touch()  # prime-rl's marker, whatever the broadcast is
    expected = Reference(directory)(PROMPT, 16)
    with fleet.client() as admin:
        assert admin.get("/health").status_code == 200
        assert MODEL in {model["id"] for model in admin.get("/v1/models").json()["data"]}
        succeeded(admin.post("/pause", params={"mode": "keep", "clear_cache": "false"}))
        try:
            succeeded(admin.post("/update_weights", json={"weight_dir": directory.as_posix()}))
        finally:
            succeeded(admin.post("/resume"))
        assert [answer.token_ids for answer in on_every_replica(admin).values()] == [expected] * 2


@pytest.mark.long  # the fleet waits ten seconds for the directory that is missing
@ADAPTERS
def test_prime_rl_loads_adapters_under_one_name(adapted: Adapted) -> None:
    with adapted.fleet.client() as admin:
        # Retried by prime-rl: a shared file system may lag behind.
        missing = {"lora_name": "run", "lora_path": (adapted.root / "step_0").as_posix()}
        assert admin.post("/load_lora_adapter", json=missing).status_code == 404
        try:
            for seed in (41, 42):
                path = adapted.save(f"step_{seed}", seed).as_posix()
                succeeded(admin.post("/load_lora_adapter", json={"lora_name": "run", "lora_path": path}))
                expected = Merged(served_checkpoint(adapted.fleet), seed)(PROMPT, COUNT)
                assert [tokens(answer) for answer in everywhere(admin, "run")] == [expected] * 2
        finally:
            unload(admin, "run")


# -- SkyRL -----------------------------------------------------------------------------------------


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as made:
        yield made


async def call(
    session: aiohttp.ClientSession, url: str, method: str = "POST", **arguments: Any
) -> dict[str, Any] | None:
    async with session.request(method, url, **arguments) as answer:
        content = await answer.json() if answer.content_length else None
        assert answer.status < 400, content
        return content


async def test_skyrl_tokenizes_on_the_server(fleet: Fleet, session: aiohttp.ClientSession) -> None:
    body = {"model": MODEL, "prompt": "some text", "add_special_tokens": True}
    async with session.post(f"{fleet.url}/tokenize", json=body) as answer:
        ids = (await answer.json())["tokens"]
    async with session.post(f"{fleet.url}/detokenize", json={"model": MODEL, "tokens": ids}) as answer:
        assert (await answer.json())["prompt"] == "some text"


async def test_skyrl_controls_the_fleet(fleet: Fleet, session: aiohttp.ClientSession) -> None:
    url = fleet.url
    assert await call(session, f"{url}/get_world_size", "GET", json={}) == {"world_size": 2}
    for mode in ("keep", "abort", "wait"):
        params = {"mode": mode, "clear_cache": "false"}
        assert await call(session, f"{url}/pause", params=params) == {"status": "paused"}
        assert await call(session, f"{url}/resume") == {"status": "resumed"}
    body = {"reset_running_requests": False}
    assert await call(session, f"{url}/reset_prefix_cache", json=body) == {"success": True}
    # Level 0, which needs no GPU.
    asleep = await call(session, f"{url}/sleep", json={"level": 0})
    assert asleep == {"status": "sleeping", "level": 0}
    assert (await call(session, f"{url}/wake_up", json={"tags": ["scheduling"]}) or {})["status"] == "awake"
    assert (await call(session, f"{url}/wake_up", json={}) or {})["status"] == "awake"
    async with session.post(f"{url}/finish_session", params={"session_id": "0"}) as answer:
        assert answer.status == 200


@ADAPTERS
async def test_skyrl_loads_an_adapter_in_place(adapted: Adapted, session: aiohttp.ClientSession) -> None:
    url = adapted.fleet.url
    payload = {
        "lora_name": "skyrl-lora-7",
        "lora_path": str(adapted.save("skyrl", 43)),
        "load_inplace": True,
    }
    async with session.post(f"{url}/v1/load_lora_adapter", json=payload) as answer:
        assert answer.status == 200, await answer.text()
    generate = {"sampling_params": {"max_tokens": 4}, "model": "skyrl-lora-7", "token_ids": PROMPT}
    async with session.post(f"{url}/inference/v1/generate", json=generate) as answer:
        found = json.loads(await answer.text())
    assert found["adapter"].startswith("skyrl-lora-7@")
    with adapted.fleet.client() as client:
        unload(client, "skyrl-lora-7")


# -- ART -------------------------------------------------------------------------------------------


@ADAPTERS
def test_art_numbers_its_adapters_by_steps(adapted: Adapted) -> None:
    """It loads, asks for and unloads `name@step`; one that it loads again is another version."""
    with adapted.fleet.client() as client:
        succeeded(client.post("/sleep", params={"level": 0, "mode": "wait"}))  # level 1 needs a GPU
        succeeded(client.post("/wake_up"))
        for seed, step in ((44, 1), (45, 2), (46, 2)):
            path = adapted.save(f"art_{seed}", seed).as_posix()
            body = {"lora_name": f"agent@{step}", "lora_path": path, "load_inplace": True}
            succeeded(client.post("/v1/load_lora_adapter", json=body))
            expected = Merged(served_checkpoint(adapted.fleet), seed)(PROMPT, COUNT)
            assert [tokens(answer) for answer in everywhere(client, f"agent@{step}")] == [expected] * 2
        for step in (1, 2):
            succeeded(unload(client, f"agent@{step}"))
        assert unload(client, "agent@1").status_code == 404, "it takes that as done"
