"""An engine's processes exit with their replica, and leave no names behind.

vLLM's engine core does not notice a killed front end: it would hold memory, GPU, segments and semaphores in
/dev/shm, and sockets in /tmp. Names with the replica's id (`deployments.host.shared_memory`) show a successor
what to remove.
"""

import multiprocessing
import os
from multiprocessing import shared_memory
from typing import Any

from deployments.host.fork_server.server import die_with
from deployments.host.shared_memory import DIRECTORY, PREFIX, disown, owner, remove_orphans

OWNER = "SLIPSTREAM_ENGINE_OWNER"
_SOCKETS = "VLLM_RPC_BASE_PATH"
_RANDOM_DIGITS = 16


def own_engine() -> None:
    """Own the processes of vLLM, and their names."""
    remove_orphans()
    os.environ[OWNER] = owner().id
    if _SOCKETS not in os.environ:
        sockets = DIRECTORY / owner().name("ipc")
        sockets.mkdir(mode=0o700, exist_ok=True)
        os.environ[_SOCKETS] = str(sockets)
    _use_names_of(owner().id)


def disown_engine() -> None:
    sockets = os.environ.get(_SOCKETS, "")
    if OWNER in os.environ and sockets.startswith(f"{DIRECTORY}/{PREFIX}-{os.environ[OWNER]}"):
        del os.environ[_SOCKETS]
    os.environ.pop(OWNER, None)
    disown()


def follow_owner() -> None:
    """Runs in every process that vLLM starts: exit with its replica. Waits on the pipe that multiprocessing
    keeps to each child."""
    parent = multiprocessing.parent_process()
    if OWNER not in os.environ or parent is None:
        return
    die_with(parent.sentinel)
    _use_names_of(os.environ[OWNER])


def _use_names_of(owner_id: str) -> None:
    """Python's names of segments (`psm_...`) and semaphores (`mp-...`) do not show their owner."""
    process: Any = multiprocessing.current_process()
    process._config["semprefix"] = f"/{PREFIX}-{owner_id}-mp"  # inherited by spawned processes
    names: Any = shared_memory
    names._SHM_NAME_PREFIX = f"/{PREFIX}-{owner_id}-psm-"
    names._SHM_SAFE_NAME_LENGTH = len(names._SHM_NAME_PREFIX) + _RANDOM_DIGITS
