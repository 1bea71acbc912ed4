"""A fleet that sees: the RL job learns from pictures."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest
from PIL import Image

from app.jobs import grpo, metrics
from app.jobs.options import JobOptions
from tests.documents import ROOT, commands_of
from tests.environment import users_environment
from tests.fleet.deployed import MODEL, Fleet, deployed
from tests.fleet.keeping import KEEPER
from tests.fleet.talk import from_every_replica, succeeded
from tests.trainers.vllm_images import part, picture

pytestmark = [pytest.mark.serve, pytest.mark.fleet("seeing"), pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture
def seeing(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Its processes have what Qwen's processors need of torchvision."""
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests' / 'without_torchvision'}:{ROOT}:{path}")
    return KEEPER.fleet("seeing", tmp_path_factory, _start)


def _start(root: Path) -> AbstractContextManager[Fleet]:
    from tests.tiny_models import save_tiny_seeing

    changes = {
        "engine": {"extra": {"limit_mm_per_prompt": {"image": 2, "video": 0}}},
        "trainer": {"vision": "trained", "optimizer": {"learning_rate": 3e-3}},
        "rollouts": {},
    }
    return deployed("seeing", save_tiny_seeing(root / "model"), root, changes)


def even(entry: Mapping[str, Any], answer: str) -> float:
    """The share of characters with an even code, or an odd one where the picture is light."""
    if not answer:
        return 0.0
    return fmean(ord(letter) % 2 == entry["odd"] for letter in answer)


def prompts(directory: Path) -> Path:
    """Dark and light pictures."""
    lines = []
    for odd, shade in enumerate((20, 235)):
        Image.new("RGB", (64, 64), (shade, shade, shade)).save(directory / f"{shade}.png")
        message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"{shade}.png"}}]}
        lines.append(json.dumps({"messages": [message], "odd": odd}) + "\n")
    (directory / "prompts.jsonl").write_text("".join(lines))
    return directory / "prompts.jsonl"


def test_the_reward_of_pictures_rises(seeing: Fleet, tmp_path: Path) -> None:
    options = JobOptions(
        url=seeing.url,
        prompts=prompts(tmp_path),
        reward="tests.fleet.test_images:even",
        steps=40,
        groups_per_step=4,
        answers_per_group=8,
        groups_in_flight=4,
        max_tokens=4,
        metrics=tmp_path / "metrics.jsonl",
    )
    assert grpo.run(options, time.monotonic()) == 0
    steps = metrics.records(options.metrics)
    rewards = [step.reward for step in steps]
    assert fmean(rewards[-8:]) > 0.75, f"0.5 is the most without a look at the picture: {rewards}"
    fresh = [step.trainer["rollout_kl"] for step in steps if step.trainer and step.staleness_max == 0]
    assert fresh and max(fresh) < 1e-6, "of engines and a trainer with the same tower"


def test_a_teacher_sees_the_pictures(seeing: Fleet, tmp_path: Path) -> None:
    """The fleet is its own teacher: it says of an answer what engine and trainer say."""
    options = JobOptions(
        url=seeing.url,
        prompts=prompts(tmp_path),
        teacher=seeing.url,
        loss="forward_kl",
        steps=2,
        groups_per_step=2,
        answers_per_group=4,
        max_tokens=4,
        max_staleness=0,
        metrics=tmp_path / "metrics.jsonl",
    )
    assert grpo.run(options, time.monotonic()) == 0
    for step in metrics.records(options.metrics):
        assert step.staleness_max == 0
        assert [step.teacher_kl, step.trainer["loss"]] == pytest.approx([0.0, 0.0], abs=1e-5)


def test_a_policy_imitates_what_a_teacher_says_of_pictures(seeing: Fleet, tmp_path: Path) -> None:
    """The fleet is its own teacher: cross entropy is that of its own samples."""
    options = JobOptions(
        url=seeing.url,
        prompts=prompts(tmp_path),
        teacher=seeing.url,
        loss="sft",
        steps=2,
        groups_per_step=2,
        answers_per_group=4,
        max_tokens=4,
        metrics=tmp_path / "metrics.jsonl",
    )
    with seeing.client() as client:
        before = client.get("/train/status").json()["step"]
        assert grpo.run(options, time.monotonic()) == 0
        assert client.get("/train/status").json()["step"] == before + 2
    for step in metrics.records(options.metrics):
        assert step.trainer["tokens"] and step.trainer["grad_norm"] > 0


def test_bad_images_are_refused_and_nothing_is_lost(seeing: Fleet) -> None:
    def ask(*parts: Any) -> httpx.Response:
        chat = {"model": MODEL, "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4}
        return client.post("/v1/chat/completions", json=chat, headers={"x-rollout-id": "bad-images"})

    with seeing.client() as client:
        assert ask(part(b"broken")).status_code == 400
        assert ask({**part(picture(64, 64)), "uuid": "mine"}).status_code == 400
        assert ask(*[part(picture(64, 64))] * 3).status_code == 400, "two are allowed"
        assert ask(part(picture(64, 64))).status_code == 200
        before = client.get("/train/status").json()["step"]
        entry = {"prompt_token_ids": [258, 260, 260, 259], "token_ids": [5], "logprobs": [-1.0]}
        other = part(picture(64, 64))["image_url"]["url"]
        for image, words in (("YnJva2Vu", "expected an image file"), (other, "expected placeholders of [4]")):
            body = {"trajectories": [{**entry, "advantage": 1.0, "images": [image]}]}
            answer = client.post("/train/step", json=body)
            assert answer.status_code == 400 and words in answer.text
        assert client.get("/train/status").json()["step"] == before


def test_images_beside_token_ids_are_seen_as_in_a_chat(seeing: Fleet) -> None:
    """TRL sends the features that one replica has made of an image, verifiers the image."""
    image = part(picture(64, 64, seed=9))
    message = {"role": "user", "content": [image, {"type": "text", "text": "what?"}]}
    sampling = {"n": 2, "seed": 3, "temperature": 1.0, "max_tokens": 8}
    chat = {"model": MODEL, "messages": [message], "logprobs": True, **sampling}

    def logprobs(answer: httpx.Response) -> list[list[float]]:
        choices = succeeded(answer).json()["choices"]
        return [[each["logprob"] for each in choice["logprobs"]["content"]] for choice in choices]

    def generate(session: str) -> tuple[str, httpx.Response]:
        answer = client.post("/inference/v1/generate", json=body, headers={"x-session-id": session})
        return answer.headers["x-slipstream-replica"], answer

    with seeing.client() as client:
        said = logprobs(client.post("/v1/chat/completions", json=chat))
        expected = [pytest.approx(each, abs=1e-4) for each in said]
        rendered = succeeded(client.post("/v1/chat/completions/render", json=chat)).json()
        tokens, features = rendered["token_ids"], rendered["features"]
        (place,) = features["mm_placeholders"]["image"]
        body = {"model": MODEL, "token_ids": tokens, "features": features}
        body["sampling_params"] = {**sampling, "logprobs": 0, "output_kind": 2}
        for answer in from_every_replica(generate).values():
            assert logprobs(answer) == expected
        one = tokens[: place["offset"] + 1] + tokens[place["offset"] + place["length"] :]
        body |= {"token_ids": one, "features": None, "return_token_ids": True}
        body["content_parts"] = [{"type": "image_url", "url": image["image_url"]["url"]}]
        for answer in from_every_replica(generate).values():
            assert logprobs(answer) == expected
            found = answer.json()
            assert (found["prompt_token_ids"], found["mm_placeholders"]) == (tokens, {"image": [place]})


def test_the_commands_of_the_page_run(seeing: Fleet, tmp_path: Path) -> None:
    program, job = (
        commands_of("docs/guides/images.md", start) for start in ("python examples", "slipstream rl")
    )
    text = f"""
        python() {{ {sys.executable} "{ROOT}/$1" "${{@:2}}"; }}
        {program[0]}
        {job[0].replace("slipstream rl", f"{sys.executable} -m app.jobs")} --url {seeing.url}
    """
    environment = users_environment(PYTHONPATH=str(ROOT))
    command = ["bash", "-euxc", text]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
