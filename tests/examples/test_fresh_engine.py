import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from examples import fresh_engine

PROGRAM = """
import subprocess, sys
child = subprocess.Popen(["sleep", "60"])
open(sys.argv[1], "w").write(str(child.pid))
child.wait()
"""


@pytest.mark.slow
def test_processes_of_a_program_that_takes_too_long_end_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with pytest.raises(subprocess.TimeoutExpired):
        fresh_engine.run_with_children([sys.executable, "-c", PROGRAM, str(file)], "", {}, timeout_s=2.0)
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(file.read_text())).status() == psutil.STATUS_ZOMBIE
