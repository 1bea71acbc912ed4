"""What a run shows in a terminal and in a log."""

import io
import os
import pty
import re
import select
import subprocess
import sys

import pytest

from app.jobs.run_display import Display, RunStatus, duration_text

STATUS = RunStatus(
    step=4,
    steps=20,
    doing="waiting for answers",
    detail="5 of 12 groups ready, 2 left out as too stale",
    version=3,
    elapsed_s=75.0,
    reward=0.25,
    left_s=400.0,
)
LINE = (
    "step 4 of 20: waiting for answers; 5 of 12 groups ready, 2 left out as too stale, version 3, 1 min, "
    "7 min left"
)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "0 s"), (59, "59 s"), (150, "2 min"), (7500, "2 h 5 min"), (3599, "1 h 0 min")],
)
def test_times_are_said_as_people_say_them(seconds: float, said: str) -> None:
    assert duration_text(seconds) == said


def test_without_a_terminal_the_status_is_a_line_when_nothing_else_was_printed_for_a_while(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Display(status_s=3600) as quiet, Display(status_s=0) as impatient:
        quiet.line("step 3 of 20")
        quiet.status(STATUS)
        assert capsys.readouterr().out == "step 3 of 20\n"
        impatient.status(STATUS)
        assert capsys.readouterr().out == f"{LINE}\n"


PROGRAM = """
from app.jobs.run_display import Display
from tests.app.jobs.test_run_display import STATUS
with Display() as display:
    display.status(STATUS)
    display.line("step 3 of 20 [bold]" + "x" * 60)
    display.status(STATUS)
"""


def drawn(columns: int, **variables: str) -> str:
    """What a terminal of this width gets."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color", **variables}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=theirs, env=environment) as process:
        os.close(theirs)
        written = io.BytesIO()
        while select.select([ours], [], [], 60)[0]:
            try:
                written.write(os.read(ours, 1 << 16))
            except OSError:  # its end, as Linux says it
                break
    assert process.returncode == 0
    os.close(ours)
    return written.getvalue().decode()


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 120])
def test_in_a_terminal_there_is_a_bar_that_fits(columns: int) -> None:
    written = drawn(columns)
    assert "\x1b[3" in written, "colours"
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written).replace("\r", "\n").split("\n")
    bars = [line.rstrip() for line in lines if "3/20" in line]
    assert bars and all("━" in bar and "reward 0.250 7 min left" in bar for bar in bars)
    assert all(len(line) <= columns for line in lines if not line.startswith("step 3"))
    assert f"step 3 of 20 [bold]{'x' * 60}" in lines, "whole, above the bar: the terminal breaks it"
    assert any(line.startswith("waiting for answers; 5 of") for line in lines)


@pytest.mark.slow
def test_without_colour_there_is_still_a_bar() -> None:
    written = drawn(80, NO_COLOR="1")
    assert "3/20" in written and not re.search(r"\x1b\[[0-9;]*3[0-9]", written)


@pytest.mark.slow
def test_a_terminal_that_cannot_move_its_cursor_gets_lines() -> None:
    assert drawn(80, TERM="dumb").splitlines() == [f"step 3 of 20 [bold]{'x' * 60}"]


@pytest.mark.slow
def test_the_first_line_is_printed_before_anything_large_is_imported() -> None:
    """What runs before the first line decides how long the silence is."""
    program = (
        "import sys; from app.client.announcement import announced; import app.jobs.run_display\n"
        "large = {'torch', 'reasoning_gym', 'httpx', 'pydantic', 'numpy', 'ray', 'vllm'} & set(sys.modules)\n"
        "print(sorted(large))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
