"""What would stop a fleet after its start is found before it, for each kind of machine."""

import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from app.command.doctor import Host, adapted, local_addresses, problems, use_a_home, version_bytes
from app.settings.config import AppConfig

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
        (GOOD, {"state_dir": f"/tmp/{'s' * 300}/state"}, ("'state_dir'", "can be written")),
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
def test_weights_that_cannot_be_read_are_named(tmp_path: Path, weights: str) -> None:
    """As after a clone without Git LFS, or a copy of the hub's cache without its blobs."""
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    if weights == "pointer":
        file.write_text("version https://git-lfs.github.com/spec/v1\nsize 1\n")
    elif weights == "dangling link":
        file.symlink_to(tmp_path / "blobs")
    else:
        file.mkdir()
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        version_bytes(config(model=str(tmp_path)))


def test_a_home_that_cannot_be_written_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    line = use_a_home()
    assert line is not None and str(tmp_path / "missing") in line and os.environ["HOME"] in line
    assert Path.home().is_dir() and Path.home().stat().st_mode & 0o077 == 0
    assert use_a_home() is None


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
    assert [word for word in ("open files", "VLLM_PLUGINS") if word not in done.stderr] == []
    assert done.stdout == "", "nothing is adapted to a limit that is refused"


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
