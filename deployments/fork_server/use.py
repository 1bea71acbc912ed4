"""How processes of ours come to be forks: Ray's workers by their runtime environment, their children by
multiprocessing's executable."""

import logging
import multiprocessing
import os
import shlex
import sys
from pathlib import Path

import ray

from deployments.fork_server.client import REASON, SWITCH

CLIENT = Path(__file__).with_name("client.py")
# Ray would start the worker in an interpreter or a container of theirs, which ours must not replace.
_OTHER_PYTHONS = ("py_executable", "pip", "uv", "conda", "container", "image_uri")


def forked_worker() -> dict[str, str]:
    """What a Ray actor's `runtime_env` needs for its process to be a fork; nothing if the job chose a Python.

    A host without this Python and these files at these paths starts its workers as usual.
    """
    environment = ray.get_runtime_context().runtime_env if ray.is_initialized() else {}
    if any(environment.get(name) for name in _OTHER_PYTHONS):
        return {}
    python, client = shlex.quote(sys.executable), shlex.quote(str(CLIENT))
    script = (
        f'if [ -x {python} ] && [ -f {client} ]; then exec {python} -IS {client} auto "$@"; '
        f'else exec python3 "$@"; fi'
    )
    return {"py_executable": f"sh -c {shlex.quote(script)} sh"}


def fork_children(logger: logging.Logger) -> None:
    """Have multiprocessing's children of this process forked by the server that has forked it.

    vLLM spawns its processes in a Ray actor, whatever it is told. Here that starts the client in the
    interpreter's place. A process that is no fork spawns as usual, and says why.
    """
    reason, directory = os.environ.get(REASON), os.environ.get(SWITCH, "off")
    if reason is not None:
        logger.warning("starts without the fork server, in 20 s more: %s", reason)
    if directory != "off":
        multiprocessing.set_executable(os.path.join(directory, "python"))
