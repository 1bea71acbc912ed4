"""`pytest --forks`: what tests and collection say arrives, and a process that dies is an error."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def outcome(directory: Path, *options: str, **files: str) -> tuple[int, str]:
    for name, text in files.items():
        (directory / f"test_{name}.py").write_text(text)
    forks = [sys.executable, "-m", "pytest", "-p", "tests.forks", "--forks", "2", "-c", "/dev/null"]
    command = [*forks, *options, f"--rootdir={directory}", directory]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    return run.returncode, run.stdout + run.stderr


def test_each_test_runs_once_and_its_outcome_is_reported(tmp_path: Path) -> None:
    files = {f"some{number}": "def test_passes(): pass\ndef test_too(): pass" for number in range(5)}
    code, output = outcome(tmp_path, **files, fails="def test_fails():\n    print('said')\n    assert 1 == 2")
    assert code == 1 and "1 failed, 10 passed" in output, output
    assert "test_fails.py::test_fails" in output and "assert 1 == 2" in output and "said" in output, output


@pytest.mark.long
def test_a_file_that_cannot_be_collected_is_an_error(tmp_path: Path) -> None:
    code, output = outcome(tmp_path, broken="import nothing_of_this_name")
    assert code != 0 and "ModuleNotFoundError" in output, output


@pytest.mark.long
def test_an_argument_that_is_no_test_is_named(tmp_path: Path) -> None:
    code, output = outcome(tmp_path, "nothing_here.py")
    assert code == pytest.ExitCode.USAGE_ERROR and "nothing_here.py" in output, output


@pytest.mark.long
def test_a_test_of_this_folder_that_is_named_runs_once(tmp_path: Path) -> None:
    code, output = outcome(
        tmp_path, "tests/deployments/ledger/test_proof.py::test_equal_replicas_have_no_difference"
    )
    assert code == 0 and "1 passed" in output, output


def test_a_process_that_dies_is_named_with_its_test(tmp_path: Path) -> None:
    code, output = outcome(tmp_path, dies="import os\ndef test_dies(): os._exit(0)")
    assert code == 3 and "died in test_dies.py::test_dies" in output, output


@pytest.mark.long
def test_a_run_ends_at_its_first_failure(tmp_path: Path) -> None:
    code, output = outcome(
        tmp_path, "-x", a="def test_fails(): assert 0", b="import time\ndef test(): time.sleep(600)"
    )
    assert code == 1 and "1 failed" in output, output
