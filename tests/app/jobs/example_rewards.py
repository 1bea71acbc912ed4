"""Rewards as users write them; a module of its own, because the process of a reward imports it."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Entry = Mapping[str, Any]
_calls: list[str] = []


def length(entry: Entry, answer: str) -> int:
    return len(answer)


async def awaited_length(entry: Entry, answer: str) -> int:
    return len(answer)


class Judge:
    async def __call__(self, entry: Entry, answer: str) -> int:
        return len(answer)


judge = Judge()


def of_one_argument(answer: str) -> float:
    return 0.0


def waits_for_a_file(entry: Entry, answer: str) -> bool:
    """Whether it appears."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if Path(entry["file"]).exists():
            return True
        time.sleep(0.01)
    return False


async def never_answers(entry: Entry, answer: str) -> float:
    await asyncio.Event().wait()
    return 0.0


def meets_another(entry: Entry, answer: str) -> bool:
    Path(entry["mine"]).touch()
    return waits_for_a_file({"file": entry["other"]}, answer)


def sees_the_rest(entry: Entry, answer: str, messages: Any, finish_reason: str, token_ids: Any) -> int:
    return len(messages) + len(token_ids) if finish_reason == "length" else 0


def sees_all(entry: Entry, answer: str, **given: Any) -> int:
    return sees_the_rest(entry, answer, **given)


async def awaits_the_rest(entry: Entry, answer: str, *, token_ids: Any) -> int:
    return len(token_ids) + 1


def calls_before(entry: Entry, answer: str) -> int:
    _calls.append(answer)
    return int("".join(_calls))


def limits_its_time(entry: Entry, answer: str) -> int:
    """As math-verify does."""
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    return 1


def runs_a_loop(entry: Entry, answer: str) -> int:
    return asyncio.run(awaited_length(entry, answer))


def undeclared(entry: Entry, answer: str) -> Any:
    return awaited_length(entry, answer)


def exits(entry: Entry, answer: str) -> float:
    os._exit(3)


def fails(entry: Entry, answer: str) -> float:
    return float(entry["right"])


def returns_nothing(entry: Entry, answer: str) -> None:
    """A common mistake."""


def kills_the_job(entry: Entry, answer: str) -> float:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(120)
    return 0.0


def starts_a_program(entry: Entry, answer: str) -> float:
    """As one that runs what the model wrote."""
    subprocess.run(["sh", "-c", f"echo $$ > {entry['file']}; exec sleep 600"], check=True)
    return 0.0


if multiprocessing.parent_process() is not None and "IMPORT_WAITS_FOR" in os.environ:
    waits_for_a_file({"file": os.environ["IMPORT_WAITS_FOR"]}, "")
