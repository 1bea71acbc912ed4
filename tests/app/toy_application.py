"""A Serve application that starts in a second, and leaves a process behind on purpose."""

import subprocess
from typing import Any

from ray import serve


class Toy:
    """Answers every request with a greeting, or fails to start."""

    def __init__(self, fail: bool) -> None:
        if fail:
            raise RuntimeError("no weights here")
        # In a session of its own: Serve does not end it.
        self.orphan = subprocess.Popen(["sleep", "1000"], start_new_session=True)

    async def __call__(self, request: Any) -> str:
        return "hello"


def build(args: dict[str, Any]) -> Any:
    deployment = serve.deployment(Toy, name="Toy").options(ray_actor_options={"num_cpus": 0})
    return deployment.bind(args["served_model_name"] == "fail")
