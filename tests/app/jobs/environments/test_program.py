import asyncio
import os
import sys
import tempfile
from pathlib import Path

import pytest

from app.jobs.environments.program import Exited, Program

READY = "print('{}', flush=True)\n"
ECHO = "import sys\n" + READY + "for line in sys.stdin: sys.stdout.write(line); sys.stdout.flush()"


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where logs are kept."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


async def started(code: str, timeout_s: float = 60.0) -> Program:
    return await Program.start([sys.executable, "-c", code], os.environ, timeout_s)


async def asked(code: str) -> str:
    """Why a question to this program was not answered."""
    made = await started(code)
    with pytest.raises(Exited) as raised:
        await asyncio.wait_for(made.ask(task=1), 60)
    with pytest.raises(Exited) as second:
        await made.ask(task=2)
    assert str(second.value) == made.exited
    await made.close()
    return str(raised.value)


async def test_the_log_of_a_program_is_kept_where_an_error_names_it(logs: Path) -> None:
    why = await asked(f"import sys\n{READY}sys.stdin.readline(); sys.stderr.write('no memory')")
    (log,) = logs.iterdir()
    assert why == f"its process has ended: no memory (its log: {log})" and log.read_text() == "no memory"


async def test_questions_are_answered_beside_each_other(logs: Path) -> None:
    made = await started(ECHO)
    answers = await asyncio.gather(made.ask(task=1), made.ask(task=2))
    assert [answer["task"] for answer in answers] == [1, 2]
    await made.close()
    assert list(logs.iterdir()) == []


@pytest.mark.parametrize(
    ("writes", "said"),
    [
        ("print('hello')", "it wrote a line that is no answer: b'hello"),
        ("print('[1]')", "it wrote a line that is no answer"),
        ("print('x' * 17_000_000)", "it wrote a line of more than 16777216 bytes"),
        ("sys.stderr.write('no memory\\n')", "its process has ended: no memory"),
        ("pass", "its process has ended: it said nothing"),
    ],
)
async def test_a_program_that_ends_or_writes_something_else_answers_nothing(writes: str, said: str) -> None:
    assert said in await asked(f"import sys\n{READY}sys.stdin.readline(); {writes}; sys.stdout.flush()")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import time; time.sleep(600)", "it took longer than 1 s to start"),
        ("print('hello', flush=True); input()", "it wrote a line that is no answer"),
        ('print(\'{"error": "no such task set"}\', flush=True); input()', "^no such task set$"),
        ("raise SystemExit('wrong')", "its process has ended: wrong"),
    ],
)
async def test_a_program_that_does_not_start_is_ended_and_says_why(code: str, said: str) -> None:
    with pytest.raises(Exited, match=said):
        await started(code, timeout_s=1.0 if "sleep" in code else 60.0)


async def test_what_cannot_be_run_is_named(tmp_path: Path) -> None:
    file = tmp_path / "python"
    file.touch()
    with pytest.raises(Exited, match="python cannot be run: Permission denied"):
        await Program.start([str(file)], os.environ, 60.0)


async def test_a_cancelled_question_is_cancelled_in_the_program_too(tmp_path: Path) -> None:
    code = f"import sys\n{READY}first, second = sys.stdin.readline(), sys.stdin.readline()\n"
    file = tmp_path / "second"
    made = await started(f"{code}open({str(file)!r}, 'w').write(second)\nsys.stdin.readline()")
    question = asyncio.create_task(made.ask(task=1))
    await asyncio.sleep(0)
    question.cancel()
    await asyncio.wait([question])
    await made.close()
    assert '"cancel": true' in file.read_text()


@pytest.mark.slow
async def test_a_program_that_does_not_end_is_killed() -> None:
    made = await started(f"{READY}import time; time.sleep(600)")
    await asyncio.wait_for(made.close(grace_s=0.1), 60)
    assert made.exited == "it was closed"
