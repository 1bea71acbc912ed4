import base64
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.environment import users_environment
from trainers.images import check_images
from trainers.settings import LoraConfig, TrainerConfig
from trainers.trajectory import Trajectory, parse_trajectories
from trainers.trajectory_arrays import from_bytes, to_bytes

ROOT = Path(__file__).parents[2]
IMAGED = Trajectory(
    prompt_token_ids=(3, 4), token_ids=(5,), logprobs=(-1.0,), advantage=1.0, images=(b"a", b"b")
)


def without_torchvision(module: str, *arguments: str) -> list[str]:
    """Run a program of the tests that reads images; returns its lines."""
    path = f"{ROOT}:{ROOT / 'tests' / 'without_torchvision'}"
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    environment = users_environment(PYTHONPATH=path, VLLM_ENABLE_V1_MULTIPROCESSING="0", **settings)
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout.splitlines()


@pytest.mark.serve
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_trainer_and_engine_agree_on_images_and_a_new_tower_sees_them_anew(
    family: str, tmp_path: Path
) -> None:
    found = json.loads(without_torchvision("tests.trainers.vllm_images", str(tmp_path / "model"), family)[-1])
    assert max(found["differences"]) < 1e-4
    if family == "qwen3_vl":
        assert found["is_new_after"] == [False, True], "the reset alone drops what the old tower saw"


@pytest.mark.slow
def test_batches_are_as_transformers_and_what_cannot_be_learned_from_is_named(tmp_path: Path) -> None:
    assert without_torchvision("tests.trainers.image_checks", str(tmp_path))[-1] == "all right"


def test_files_travel_once_in_arrays_and_in_base64_in_json() -> None:
    batch = [IMAGED, replace(IMAGED, images=(b"b",)), replace(IMAGED, images=())]
    sent = to_bytes(batch)
    assert [each.images for each in from_bytes(sent)] == [(b"a", b"b"), (b"b",), ()]
    assert len(to_bytes([replace(IMAGED, images=(bytes(5000),))] * 9)) < 10_000
    form = {"prompt_token_ids": [3], "token_ids": [4], "logprobs": [-1.0], "advantage": 1.0}
    data = base64.b64encode(b"picture").decode()
    for text in (data, f"data:image/png;base64,{data}"):
        assert Trajectory.from_json({**form, "images": [text]}).images == (b"picture",)
    with pytest.raises(ValueError, match=r"images\.0: .*expected an image file in base64 or a data URL"):
        parse_trajectories([{**form, "images": ["/a/file.png"]}], vocabulary_size=9, max_length=None)


def test_a_trainer_of_text_refuses_images() -> None:
    with pytest.raises(ValueError, match=r"trajectory 0: expected no images, got 2 .*'trainer.vision'"):
        check_images([IMAGED], None)


@pytest.mark.parametrize(
    "settings",
    [
        {"vision": "frozen", "strategy": "fsdp2"},
        {"vision": "trained", "lora": LoraConfig(name="a")},
    ],
)
def test_settings_that_images_exclude_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="'vision': expected"):
        TrainerConfig.model_validate(settings)
