"""An engine's processes exit with the replica that started them, and leave no names behind.

vLLM's engine core does not notice that its front end was killed: it would hold its memory and the GPU, and
its segments and semaphores in /dev/shm and sockets in /tmp would stay. Names of the replica's own
(`deployments.host.shared_memory`) let a successor tell them from those of others.
"""

import multiprocessing
import os
from multiprocessing import shared_memory
from typing import Any

from deployments.host.fork_server.server import die_with
from deployments.host.shared_memory import DIRECTORY, PREFIX, disown, owner, remove_orphans

OWNER = "SLIPSTREAM_ENGINE_OWNER"  # set by a replica before it starts its engine: its name in /dev/shm
_SOCKETS = "VLLM_RPC_BASE_PATH"
_RANDOM_DIGITS = 16


def own_engine() -> None:
    """Called by a replica: owns the processes that vLLM spawns from here on, and their names. Removes names
    of replicas that are gone."""
    remove_orphans()
    os.environ[OWNER] = owner().id
    if _SOCKETS not in os.environ:
        sockets = DIRECTORY / owner().name("ipc")
        sockets.mkdir(mode=0o700, exist_ok=True)
        os.environ[_SOCKETS] = str(sockets)
    _use_names_of(owner().id)


def disown_engine() -> None:
    """Called by a replica whose engine has stopped: removes its names."""
    sockets = os.environ.get(_SOCKETS, "")
    if OWNER in os.environ and sockets.startswith(f"{DIRECTORY}/{PREFIX}-{os.environ[OWNER]}"):
        del os.environ[_SOCKETS]
    os.environ.pop(OWNER, None)
    disown()


def follow_owner() -> None:
    """Called in every process that vLLM starts; does nothing unless a replica owns it. Waits on the pipe that
    multiprocessing keeps from each process to its children."""
    parent = multiprocessing.parent_process()
    if OWNER not in os.environ or parent is None:
        return
    die_with(parent.sentinel)
    _use_names_of(os.environ[OWNER])


def _use_names_of(owner_id: str) -> None:
    """Python's own names of segments (`psm_...`) and semaphores (`mp-...`) do not tell their owner."""
    process: Any = multiprocessing.current_process()
    process._config["semprefix"] = f"/{PREFIX}-{owner_id}-mp"  # spawned processes inherit it
    names: Any = shared_memory
    names._SHM_NAME_PREFIX = f"/{PREFIX}-{owner_id}-psm-"
    names._SHM_SAFE_NAME_LENGTH = len(names._SHM_NAME_PREFIX) + _RANDOM_DIGITS
