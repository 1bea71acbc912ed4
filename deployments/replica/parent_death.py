"""An engine's processes end with the replica that started them, however it ended.

vLLM's engine core does not notice that its front end was killed: it would hold its memory, and the GPU,
forever.
"""

import ctypes
import multiprocessing
import os
import signal

OWNER = "SLIPSTREAM_ENGINE_OWNER"  # set by a replica before it starts its engine: its process id
_PR_SET_PDEATHSIG = 1


def own_engine() -> None:
    """Called by a replica: the processes that vLLM spawns from here on are its own."""
    os.environ[OWNER] = str(os.getpid())


def follow_owner() -> None:
    """Called in every process that vLLM starts; does nothing unless a replica owns it.

    The kernel sends the signal when the parent's *thread* that spawned us ends: a replica starts
    its engine on its event loop's thread, which lives as long as the process.
    """
    parent = multiprocessing.parent_process()
    if OWNER not in os.environ or parent is None or parent.pid is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it died before the signal was requested
        os._exit(1)
