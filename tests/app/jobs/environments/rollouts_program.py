"""A program in the place of verifiers': the same lines, and rollouts that end in the ways of its own.

    rollouts_program.py -P PROGRAM HOW FOLDER

It leaves files in FOLDER that say what happened to it.
"""

import asyncio
import atexit
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from app.jobs.environments.verifiers_program import RolloutRunner, run


class FakeRunner:
    """Two turns; the reward is the number of the task."""

    def __init__(self, how: str, folder: Path) -> None:
        self.how = how
        self.folder = folder

    async def roll_out(self, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self.play(asked)
        except asyncio.CancelledError:
            (self.folder / "cancelled").touch()
            raise

    async def play(self, asked: dict[str, Any]) -> dict[str, Any]:
        print("what an environment prints is no answer")
        session = uuid.uuid4().hex
        match self.how:
            case "raises":
                raise RuntimeError("the tool is broken\nand this is its second line")
            case "raises once" if self.first("raised"):
                raise RuntimeError("the tool is broken")
            case "dies" | "dies once" if self.how == "dies" or self.first("died"):
                print("no memory is left", file=sys.stderr, flush=True)
                os._exit(3)
            case "hangs":
                await asyncio.sleep(600)
            case "reads":
                subprocess.run(["cat"], check=True)  # as a tool does that a model has called
            case "starts another":
                other = subprocess.Popen(["sleep", "600"], start_new_session=True)
                (self.folder / "other").write_text(str(other.pid))
        await self.turn(asked, session, 1)
        await self.turn(asked, uuid.uuid4().hex, 1)  # of a judge
        try:
            await self.turn(asked, session, 2)
        except urllib.error.HTTPError as error:
            return {"error": f"ProviderError: {error.code}", "sessions": [session]}
        seen = {name: os.environ.get(name) for name in ("NO_PROXY", "COLOUR", "HF_TOKEN")}
        seen |= {name: value for name, value in os.environ.items() if "secret" in value}
        text = json.dumps(seen)
        return {"reward": float(asked["task"]), "sessions": [session], "text": text}

    def first(self, what: str) -> bool:
        """Whether this has not happened before."""
        file = self.folder / what
        if file.exists():
            return False
        file.touch()
        return True

    async def turn(self, asked: dict[str, Any], session: str, turn: int) -> None:
        body = {"model": asked["model"], "messages": [{"role": "user", "content": "x"}] * turn}
        request = urllib.request.Request(
            f"{asked['url']}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"X-Session-ID": session, "content-type": "application/json"},
        )
        await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=30).read())


@asynccontextmanager
async def opened(arguments: list[str]) -> AsyncIterator[RolloutRunner]:
    _, _, how, folder = arguments
    if how == "has no tasks":
        raise ValueError("the task set has no tasks")
    (Path(folder) / "pid").write_text(str(os.getpid()))
    atexit.register((Path(folder) / "ended").touch)
    yield FakeRunner(how, Path(folder))


if __name__ == "__main__":
    run(opened)
