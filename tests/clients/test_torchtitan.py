"""torchtitan's own checkpoints, written by two ranks, through `examples/torchtitan_publisher.py`."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.clients.environments import HERE, shell
from tests.fleet.deployed import Fleet
from tests.fleet.talk import stored, wait_for
from tests.tiny_models import save_tiny_experts, save_tiny_family, save_tiny_llama

pytestmark = [pytest.mark.clients, pytest.mark.long, pytest.mark.timeout(900)]
ROOT, PROGRAMS = HERE.parents[1], HERE / "programs"


def python(command: str) -> str:
    return shell("torchtitan", command, ROOT, timeout_s=600, PYTHONPATH=f"{ROOT}:{PROGRAMS}")


def saving(*saves: tuple[Path, Path, int], changes: bool = False) -> str:
    """The command that saves each source in a folder as a step."""
    named = [{"source": str(source), "folder": str(folder), "step": step} for source, folder, step in saves]
    return f"python {PROGRAMS / 'torchtitan_save.py'} '{json.dumps({'saves': named, 'changes': changes})}'"


def publishing(fleet: Fleet, checkpoint: Path, flavor: Path, more: str = "") -> str:
    options = f"{checkpoint} torchtitan_models {flavor} --url {fleet.url} {more}"
    return f"python -m examples.torchtitan_publisher {options}"


def test_sharded_checkpoints_are_read_as_hugging_face_has_them(tmp_path: Path) -> None:
    sources = [
        save_tiny_llama(tmp_path / "llama", 5),
        save_tiny_family(tmp_path / "qwen3", "qwen3", 5),
        save_tiny_experts(tmp_path / "qwen3_moe", 5),
        save_tiny_family(tmp_path / "deepseek_v3", "deepseek_v3", 5),
        save_tiny_llama(tmp_path / "tied", 5, tied=True),
    ]
    steps = tmp_path / "steps"
    saves = [(source, steps, number) for number, source in enumerate(sources)]
    found: Any = json.loads(python(saving(*saves, changes=True)).splitlines()[-1])
    for source, same in zip(sources, found["same"], strict=True):
        assert same["others"] == [] and same["same"] == same["expected"] > 10, source.name
    written, removed = found["errors"]
    assert written == f"{steps}/step-4 was written while it was read"
    assert f"{steps}/step-4 cannot be read" in removed and "No such file" in removed


@pytest.mark.serve
@pytest.mark.fleet("shared")
def test_steps_are_published_when_they_are_complete(fleet: Fleet, tmp_path: Path) -> None:
    sources = [save_tiny_llama(tmp_path / f"{seed}", seed) for seed in (51, 52)]
    steps, log, before = tmp_path / "steps", tmp_path / "log", fleet.version()
    python(saving((sources[0], steps, 10)))
    (steps / "step-30").mkdir()  # not complete
    python(
        f"{publishing(fleet, steps, sources[0], '--follow')} >{log} 2>&1 & trap 'kill $!' EXIT\n"
        f"until grep -q step-10: {log}; do kill -0 $!; sleep 0.5; done\n{saving((sources[1], steps, 20))}\n"
        f"until grep -q step-20: {log}; do kill -0 $!; sleep 0.5; done"
    )
    assert fleet.version() == before + 2, log.read_text()
    for version, source in enumerate(sources, before + 1):
        expected = load_file(source / "model.safetensors")
        found = load_file(wait_for(stored(fleet, version)) / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(found[name].equal(tensor) for name, tensor in expected.items())


@pytest.mark.serve
@pytest.mark.fleet("shared")
def test_what_is_not_a_step_of_the_fleets_model_changes_nothing(fleet: Fleet, tmp_path: Path) -> None:
    llama, other = save_tiny_llama(tmp_path / "llama", 51), save_tiny_family(tmp_path / "other", "qwen3", 5)
    steps, before = tmp_path / "steps", fleet.version()
    python(saving((other, steps, 10)))
    for checkpoint, flavor, text in (
        (steps, other, f"expected a complete checkpoint of torchtitan, with .metadata, got {steps}"),
        (steps / "step-10", llama, "first 'layers.0.attention.q_norm.weight': expected None, got [32]"),
        (steps / "step-10", other, "'model.layers.0.self_attn.q_norm.weight' is not a tensor of this model"),
    ):
        assert text in python(f"! {publishing(fleet, checkpoint, flavor)} 2>&1")
    assert fleet.version() == before
