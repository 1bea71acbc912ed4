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
OVER_OURS = {"trl"}  # sees our packages behind its own: it imports vLLM and torch
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


def run(client: str, program: str, url: str, *, timeout_s: float = 300.0, **options: Any) -> dict[str, Any]:
    """What a program of `programs` found: the JSON in its last line.

    It sees neither this process's environment variables nor its packages.
    """
    script = HERE / "programs" / f"{program}.py"
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [str(python_of(client)), str(script), json.dumps({"url": url, **options})],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        cwd=PLACE,
    )
    assert done.returncode == 0, (
        f"{script.name} ended with {done.returncode}:\n{_end(done.stdout)}\n{_end(done.stderr)}"
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _end(text: str, characters: int = 4000) -> str:
    return text[-characters:]
