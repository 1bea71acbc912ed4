"""A Serve application that fails to start, and leaves a process behind on purpose.

Its deployments have the names of those that take live settings (`app/command/deploy.py`).
"""

import os
import subprocess
from pathlib import Path
from typing import Any

from ray import serve

from app.command.runs import MARK


class Settled:
    """Takes any live settings."""

    def reconfigure(self, settings: dict[str, Any]) -> None:
        self.settings = settings


class Toy(Settled):
    """Writes the mark that its processes inherit into a file, and fails."""

    def __init__(self, file: str, controller: Any) -> None:
        # In a session of its own: Serve does not end it.
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        Path(file).write_text(os.environ[MARK])
        raise RuntimeError("no weights here")


def build(args: dict[str, Any]) -> Any:
    without_cpus = {"ray_actor_options": {"num_cpus": 0}}
    controller = serve.deployment(Settled, name="controller").options(**without_cpus)
    router = serve.deployment(Toy, name="router").options(**without_cpus)
    return router.bind(f"{args['model']}/mark", controller.bind())
