import asyncio
import subprocess
import sys

import pytest

from app.jobs.progress import Progress


@pytest.mark.slow
async def test_in_a_log_file_the_state_is_a_line_while_nothing_else_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Progress(steps=3, done=0, state=lambda: "5 in flight", quiet_s=0.2) as progress:
        watching = asyncio.ensure_future(progress.watch())
        for _ in range(5):
            progress.say("a step")
            await asyncio.sleep(0.05)
        spoken = capsys.readouterr().out
        await asyncio.sleep(1.0)
        watching.cancel()
    assert spoken.count("a step") == 5
    assert "5 in flight" in capsys.readouterr().out


def test_the_first_line_is_printed_before_anything_large_is_imported() -> None:
    """What runs before the first line decides how long the silence is."""
    program = (
        "import sys; from app.client.announcement import announced\n"
        "large = {'torch', 'reasoning_gym', 'httpx', 'pydantic', 'numpy', 'ray', 'vllm'} & set(sys.modules)\n"
        "print(sorted(large))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
