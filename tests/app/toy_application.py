"""A Serve application that starts in a second, and leaves a process behind on purpose.

Its deployments have the names of those that take live settings (`app/command/deploy.py`).
"""

import subprocess
from typing import Any

from ray import serve


class Settled:
    """Takes any live settings."""

    def reconfigure(self, settings: dict[str, Any]) -> None:
        self.settings = settings


class Toy(Settled):
    """Answers every request with a greeting, or fails to start."""

    def __init__(self, fail: bool, controller: Any) -> None:
        if fail:
            raise RuntimeError("no weights here")
        # In a session of its own: Serve does not end it.
        self.orphan = subprocess.Popen(["sleep", "1000"], start_new_session=True)

    async def __call__(self, request: Any) -> str:
        return "hello"


def build(args: dict[str, Any]) -> Any:
    without_cpus = {"ray_actor_options": {"num_cpus": 0}}
    controller = serve.deployment(Settled, name="controller").options(**without_cpus)
    router = serve.deployment(Toy, name="router").options(**without_cpus)
    return router.bind(args["served_model_name"] == "fail", controller.bind())
