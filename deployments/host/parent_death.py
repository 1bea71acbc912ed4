"""An engine's processes end with the replica that started them, however it ended, and leave no names behind.

vLLM's engine core does not notice that its front end was killed: it would hold its memory, and the GPU,
forever. Its processes would leave what they have named outside of themselves: segments and semaphores in
/dev/shm, sockets in /tmp. Names of the replica's own (`deployments.host.shared_memory`) let its
successor tell them from those of others.
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
    """Called by a replica: the processes that vLLM spawns from here on are its own, and what they name.

    Removes what was left by replicas that are gone.
    """
    remove_orphans()
    os.environ[OWNER] = owner().id
    if _SOCKETS not in os.environ:
        sockets = DIRECTORY / owner().name("ipc")
        sockets.mkdir(mode=0o700, exist_ok=True)
        os.environ[_SOCKETS] = str(sockets)
    _use_names_of(owner().id)


def disown_engine() -> None:
    """Called by a replica whose engine has ended: removes what was named."""
    sockets = os.environ.get(_SOCKETS, "")
    if OWNER in os.environ and sockets.startswith(f"{DIRECTORY}/{PREFIX}-{os.environ[OWNER]}"):
        del os.environ[_SOCKETS]
    os.environ.pop(OWNER, None)
    disown()


def follow_owner() -> None:
    """Called in every process that vLLM starts; does nothing unless a replica owns it.

    multiprocessing keeps a pipe from each process to its children, for them to wait on.
    """
    parent = multiprocessing.parent_process()
    if OWNER not in os.environ or parent is None:
        return
    die_with(parent.sentinel)
    _use_names_of(os.environ[OWNER])


def _use_names_of(owner_id: str) -> None:
    """Python's own names of segments (`psm_...`) and semaphores (`mp-...`) say nothing of who made them."""
    process: Any = multiprocessing.current_process()
    process._config["semprefix"] = f"/{PREFIX}-{owner_id}-mp"  # spawned processes inherit it
    names: Any = shared_memory
    names._SHM_NAME_PREFIX = f"/{PREFIX}-{owner_id}-psm-"
    names._SHM_SAFE_NAME_LENGTH = len(names._SHM_NAME_PREFIX) + _RANDOM_DIGITS
