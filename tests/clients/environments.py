"""An environment for each client, made once from its pinned requirements, and programs that run in it."""

import fcntl
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PLACE = Path(os.environ.get("SLIPSTREAM_CLIENTS", HERE.parents[1] / ".venv-clients"))
INSTALL_S = 900.0
VLLM = "0.32.0"  # whose examples are run
OVER_OURS = {"torchtitan", "trl"}  # see our packages behind their own: they import vLLM and torch
PASSED_ON = ("HOME", "LANG", "PATH", "SSL_CERT_FILE", "TMPDIR")


def python_of(client: str) -> Path:
    """The interpreter of a client's environment; installs what is missing, in seconds to minutes."""
    requirements = HERE / "requirements" / f"{client}.txt"
    directory = PLACE / client
    stamp = directory / "requirements.txt"
    python = directory / "bin" / "python"
    PLACE.mkdir(parents=True, exist_ok=True)
    with (PLACE / f"{client}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test process may be making it
        if not stamp.exists() or stamp.read_text() != requirements.read_text():
            _install(directory, requirements)
            stamp.write_text(requirements.read_text())
    return python


def _install(directory: Path, requirements: Path) -> None:
    pip = [str(directory / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(directory)],
        [*pip, "--no-deps", "--no-input", "-r", str(requirements)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    if directory.name in OVER_OURS:
        (packages,) = directory.glob("lib/python3*/site-packages")
        (packages / "ours.pth").write_text(sysconfig.get_path("purelib"))


def from_npm(command: str) -> Path:
    """The directory in which this `npm install` was run, once."""
    directory = PLACE / "npm"
    stamp = directory / "command"
    directory.mkdir(parents=True, exist_ok=True)
    with (PLACE / "npm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != command:
            done = subprocess.run(
                ["bash", "-euc", command], cwd=directory, capture_output=True, text=True, timeout=INSTALL_S
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            stamp.write_text(command)
    return directory


def vllms_examples() -> Path:
    """vLLM's `examples/rl`, from its source distribution, which pip downloads once (45 MB).

    pip cannot build it here, and need not: it leaves behind what it has unpacked.
    """
    directory = PLACE / "vllm-source"
    directory.mkdir(parents=True, exist_ok=True)
    with (PLACE / "vllm-source.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _unpacked(directory):
            command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-input"]
            command += ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--no-clean"]
            command += [f"vllm=={VLLM}", "--dest", str(directory)]
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=INSTALL_S,
                env=os.environ | {"TMPDIR": str(directory)},
            )
            assert _unpacked(directory), f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return _unpacked(directory)[0]


def _unpacked(directory: Path) -> list[Path]:
    return sorted(directory.glob("pip-download-*/vllm_*/examples/rl"))


def run(client: str, program: str, url: str, *, timeout_s: float = 300.0, **options: Any) -> dict[str, Any]:
    """What a program of `programs` found: the JSON in its last line."""
    script = HERE / "programs" / f"{program}.py"
    command = [str(python_of(client)), str(script), json.dumps({"url": url, **options})]
    printed = _run(client, command, PLACE, timeout_s, {})
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def shell(client: str, command: str, cwd: Path, *, timeout_s: float = 300.0, **variables: str) -> str:
    """What a command prints that is run in a client's environment, as after its `activate`."""
    return _run(client, ["bash", "-euc", command], cwd, timeout_s, variables)


def _run(client: str, command: list[str], cwd: Path, timeout_s: float, variables: dict[str, str]) -> str:
    """It sees neither this process's environment variables nor its packages."""
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "NO_PROXY": "127.0.0.1"}
    environment["PATH"] = f"{python_of(client).parent}:{environment['PATH']}"
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=environment | variables, cwd=cwd
    )
    assert done.returncode == 0, (
        f"{' '.join(command)} ended with {done.returncode}:\n{_end(done.stdout)}\n{_end(done.stderr)}"
    )
    return done.stdout


def _end(text: str, characters: int = 4000) -> str:
    return text[-characters:]
