"""Ray starts a worker as a fork, by the `py_executable` of its runtime environment."""

import logging
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deployments.host.fork_server.client import REASON

CLIENT = Path(__file__).with_name("client.py")
# With these Ray starts the worker in another interpreter or a container, which ours must not replace.
_OTHER_PYTHONS = ("py_executable", "pip", "uv", "conda", "container", "image_uri")


def forked_worker(environment: Mapping[str, Any]) -> dict[str, str]:
    """The `runtime_env` that makes an actor's process a fork; empty if `environment`, that of its job or its
    own, has chosen a Python.

    A host without this Python and these files at these paths starts workers as usual.
    """
    if any(environment.get(name) for name in _OTHER_PYTHONS):
        return {}
    python, client = shlex.quote(sys.executable), shlex.quote(str(CLIENT))
    script = (
        f'if [ -x {python} ] && [ -f {client} ]; then exec {python} -IS {client} auto "$@"; '
        f'else exec python3 "$@"; fi'
    )
    return {"py_executable": f"sh -c {shlex.quote(script)} sh"}


def warn_if_not_forked(logger: logging.Logger) -> None:
    reason = os.environ.get(REASON)
    if reason is not None:
        logger.warning("started without the fork server, with imports of its own: %s", reason)
