"""The priority of threads that work beside an engine which decodes on the same cores."""

import os
import sys
import threading


def yield_to_others(levels: int) -> None:
    """Lower the calling thread's priority by so many levels of nice, each a fifth of its time where all cores
    are busy. It cannot be raised again."""
    if sys.platform != "linux":  # elsewhere it is the priority of the process
        return
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + levels)
