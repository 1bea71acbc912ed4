"""Chooses and checks packages for a machine. `make` runs this file with the system's Python.

    python app/command/machine.py choose VENV CONFIG    prints `gpu` or `cpu`: requirements-<that>.txt
    python app/command/machine.py check BUILD [CONFIG]  prints a sentence if the machine does not suffice
    python app/command/machine.py uv                    prints pip's package indexes as uv's variables

`app.settings.gpus` counts GPUs later.
"""

from __future__ import annotations  # older Pythons run this file

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

CPU, GPU = "cpu", "gpu"
BUILD_FILE = ".build"  # names an environment's packages
MIN_DRIVER = "580.65.06"  # CUDA 13.0, for torch 2.14 and vLLM 0.33
MIN_CAPABILITY = "7.5"  # the oldest for CUDA 13
TIMEOUT_S = 30.0
QUERY = ("--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader")
_DEVICE = re.compile(r"""(?:^|[\s{,])["']?device["']?\s*:\s*["']?(cuda|cpu)\b""")

AskGpus = Callable[[], str]  # returns nvidia-smi's output for `QUERY`


class NotEnough(Exception):
    """This machine cannot run the configuration; the text is one sentence."""


def build_for(config: str) -> str:
    for line in config.splitlines():
        found = _DEVICE.search(line.split("#")[0])
        if found is not None:
            return GPU if found[1] == "cuda" else CPU
    return CPU


def choose(venv: Path, config: Path) -> str:
    if (venv / BUILD_FILE).is_file():
        return (venv / BUILD_FILE).read_text(encoding="utf-8").strip()
    return build_for(config.read_text(encoding="utf-8")) if config.is_file() else CPU


def check(build: str, config: Path | None, ask: AskGpus) -> None:
    """Raises NotEnough. `config` None: only packages are installed."""
    if config is not None:
        if not config.is_file():
            raise NotEnough(f"expected a configuration file, got CONFIG={config}, which does not exist")
        needed = build_for(config.read_text(encoding="utf-8"))
        if needed == GPU:
            check_gpus(ask())  # first: other packages would not help
        if needed != build:
            device = "cuda" if needed == GPU else "cpu"
            raise NotEnough(
                f"{config} has 'device: {device}', and the environment has the packages for {build.upper()}: "
                f"make serve CONFIG={config} VENV=.venv-{needed}"
            )
    elif build == GPU:
        check_gpus(ask())


def check_gpus(answer: str) -> None:
    """Raises NotEnough. `answer`: nvidia-smi's output, one line per GPU."""
    gpus = [line.split(",") for line in answer.splitlines() if line.strip()]
    if not gpus:
        raise NotEnough("'device: cuda' needs an NVIDIA GPU, and nvidia-smi names none on this machine")
    for cells in gpus:
        name, driver, capability = [cell.strip() for cell in cells] if len(cells) == 3 else ("", "", "")
        if not _numbers(driver) or not _numbers(capability):
            raise NotEnough(f"expected name, driver and capability from nvidia-smi, got {answer[:200]!r}")
        if _numbers(driver) < _numbers(MIN_DRIVER):
            raise NotEnough(
                f"vLLM 0.33.0 and its torch need an NVIDIA driver of {MIN_DRIVER} or newer "
                f"(CUDA 13.0), got {driver}"
            )
        if _numbers(capability) < _numbers(MIN_CAPABILITY):
            raise NotEnough(
                f"vLLM 0.33.0 and its torch need GPUs of compute capability {MIN_CAPABILITY} or "
                f"higher, got {name} with {capability}"
            )


def count_gpus(answer: str, visible: str | None) -> int:
    """Those that a process may use; `visible`: CUDA_VISIBLE_DEVICES."""
    every = sum(bool(line.strip()) for line in answer.splitlines())
    if visible is None:
        return every
    return min(every, sum(bool(name.strip()) and name.strip() != "NoDevFiles" for name in visible.split(",")))


def ask_gpus() -> str:
    """Raises NotEnough."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise NotEnough(
            "'device: cuda' needs an NVIDIA GPU and its driver, and this machine has no nvidia-smi; "
            "'make serve' without CONFIG serves on CPUs"
        )
    try:
        done = subprocess.run([program, *QUERY], capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotEnough(f"'device: cuda' needs a driver that works, and nvidia-smi fails: {error}") from error
    if done.returncode:
        said = f"{done.stdout} {done.stderr}".split("\n")[0].strip()
        raise NotEnough(f"'device: cuda' needs a driver that works, and nvidia-smi fails: {said[:200]}")
    return done.stdout


UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
}


def uv_variables(pip_config: str, environment: Mapping[str, str]) -> dict[str, str]:
    """From pip's configuration (`pip config list`), which uv does not read."""
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):  # later ones win
        for name, value in re.findall(rf"^{section}\.([\w-]+)=(.*)$", pip_config, re.MULTILINE):
            if name in UV_NAMES:
                words = str(ast.literal_eval(value)).split()
                found[UV_NAMES[name]] = ("," if name == "find-links" else " ").join(words)
    return {name: value for name, value in found.items() if name not in environment}


def ask_pip() -> str:
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    return done.stdout


def _numbers(text: str) -> tuple[int, ...]:
    """Empty if it is no version."""
    return tuple(map(int, text.split("."))) if re.fullmatch(r"\d+(\.\d+)*", text) else ()


def main(arguments: Sequence[str]) -> int:
    command, *paths = arguments
    if command == "choose":
        print(choose(Path(paths[0]), Path(paths[1])))
        return 0
    if command == "uv":
        for name, value in uv_variables(ask_pip(), os.environ).items():
            print(f"export {name}={shlex.quote(value)}")
        return 0
    try:
        check(paths[0], Path(paths[1]) if paths[1:] else None, ask_gpus)
    except NotEnough as reason:
        print(f"Slipstream cannot start here: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
