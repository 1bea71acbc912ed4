"""Programs and commands of the documents, which differ in the fleet's address and what it serves."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.clients.environments import python_of
from tests.documents import BLOCKS, BLOCKS_ELSEWHERE, COMMANDS_ELSEWHERE, ROOT, Block, commands
from tests.environment import users_environment
from tests.fleet.adapter_fleet import Adapted
from tests.fleet.deployed import MODEL, Fleet
from tests.fleet.talk import PROMPT, sampled, saved, train_and_publish
from tests.tiny_models import tiny_llama

pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]
LONG = [pytest.mark.clients, pytest.mark.long, pytest.mark.timeout(900)]
WITH_A_CLIENT = {
    "docs/clients/litellm.md": "litellm",
    "docs/clients/trl.md": "trl",
    "docs/guides/rollouts.md 2": "trl",
}
PUBLISHES = {
    "README.md": 2,
    "docs/guides/trainer.md": 1,
    "docs/guides/rollouts.md": 2,
    "docs/guides/rollouts.md 2": 2,
}
WITH_ADAPTERS = "docs/guides/adapters.md"


def here(text: str, fleet: Fleet, more: Mapping[str, str]) -> str:
    common = {"http://127.0.0.1:8000": fleet.url, "smollm2-135m": MODEL}
    for documented, ours in (common | more).items():
        text = text.replace(documented, ours)
    return text


PROGRAMS = [
    pytest.param(each, id=each.name, marks=LONG if each.name in WITH_A_CLIENT else [])
    for each in BLOCKS
    if each.language == "python" and ("python", each.name) not in BLOCKS_ELSEWHERE
]


@pytest.mark.fleet("shared")
@pytest.mark.parametrize("block", PROGRAMS)
def test_a_program_of_a_document_runs(block: Block, fleet: Fleet, tmp_path: Path) -> None:
    more = {
        "/data/Qwen3-1.7B": str(fleet.checkpoint),
        "path/of/the/served/checkpoint": str(fleet.checkpoint),
        "model=directory": f"model={MODEL!r}",
        'app_name="slipstream"': f"app_name={fleet.application!r}",
        "range(20)": "range(2)",
        "max_steps=20": "max_steps=2, use_cpu=True, bf16=False, per_device_train_batch_size=8",
    }
    program, before = here(block.text, fleet, more), fleet.version()
    if block.name in WITH_A_CLIENT:
        (tmp_path / "program.py").write_text(program)
        command = [str(python_of(WITH_A_CLIENT[block.name])), str(tmp_path / "program.py")]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0 and done.stdout, done.stderr[-4000:]
    else:
        with fleet.client() as client:
            answers = [sampled(client, seed).trajectory(PROMPT, advantage=1.0 - seed) for seed in range(3)]
        exec(program, {"model": tiny_llama(11), "trajectories": answers, "url": fleet.url})
    assert fleet.version() == before + PUBLISHES.get(block.name, 0)


def typed(page: Path) -> list[str]:
    """The page's commands that are typed while a fleet runs."""
    found = (each for block in BLOCKS if block.page == page for each in commands(block))
    return [each for each in found if not each.startswith(tuple(COMMANDS_ELSEWHERE))]


def run(commands: list[str], fleet: Fleet, directory: Path, more: Mapping[str, str]) -> None:
    program = "\n".join(commands).replace(".venv/bin/slipstream ", "slipstream ")
    program = f"""
        curl() {{ command curl --fail-with-body --max-time 60 "$@"; }}
        slipstream() {{ {sys.executable} -m app.command.cli "$@"; }}
        {here(program, fleet, more)}
    """
    done = subprocess.run(
        ["bash", "-euxc", program],
        cwd=directory,
        env=users_environment(SLIPSTREAM_URL=fleet.url, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


PAGES = dict.fromkeys(block.page for block in BLOCKS if typed(block.page))


@pytest.mark.fleet("shared")
@pytest.mark.parametrize(
    "page", [each for each in PAGES if each != ROOT / WITH_ADAPTERS], ids=lambda page: page.name
)
def test_the_commands_of_a_document_run(page: Path, fleet: Fleet, tmp_path: Path) -> None:
    with fleet.client() as client:
        train_and_publish(client)  # else what another test published would have to be named
    first, second = saved(fleet, 31), saved(fleet, 32)
    uploads = f"file://{first.parent}/run-7"
    more = {
        "/data/run-7/checkpoint-400": str(first),
        "/data/run-7/checkpoint-410": str(second),
        "s3://bucket/run-7/checkpoint-410": f"{uploads}/{second.name}",
        "s3://bucket/run-7": uploads,
        "/fleet/events": "/fleet/events | grep -m 1 ^data:",  # it goes on
    }
    run(typed(page), fleet, tmp_path, more)


@pytest.mark.fleet("gloo")
def test_the_commands_of_the_page_of_adapters_run(adapted: Adapted, tmp_path: Path) -> None:
    run(
        typed(ROOT / WITH_ADAPTERS),
        adapted.fleet,
        tmp_path,
        {"/data/adapters/step-12": str(adapted.save("step-12", seed=12))},
    )
    with adapted.fleet.client() as client:
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "math"}).is_success
