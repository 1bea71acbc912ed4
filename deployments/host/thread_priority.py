"""Threads that work beside an engine which decodes on the same cores: their priority, and how much they work.

A priority is not enough. An engine's threads wait for each other in every operation, so a thread that fills
these pauses is often running when they go on; and a call to the kernel, such as a large write, is not
interrupted.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def yield_to_others(levels: int) -> None:
    """Lower the calling thread's priority by so many levels of nice, each a fifth of its time where all cores
    are busy. It cannot be raised again."""
    if sys.platform != "linux":  # elsewhere it is the priority of the process
        return
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + levels)


class CoreShare:
    """Delays of a thread that works beside others on the cores of a CPU. Used on that thread.

    Args:
        clock: seconds, never going back.
        used: the seconds of a core that the calling thread has used.
        wait: waits for so many seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        used: Callable[[], float] = time.thread_time,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._used, self._wait = clock, used, wait
        self.begin(1.0)

    def begin(self, share: float) -> None:
        """Work begins.

        Args:
            share: of one core's time that it may take, in (0, 1]; 1 means no delays.
        """
        self._share = share
        self._since, self._before = self._clock(), self._used()

    def rest(self) -> None:
        """Wait until no more than the share was used since `begin` or the last rest. Time for which the work
        had no core counts as rest."""
        if self._share < 1.0:
            used = self._used() - self._before
            self._wait(max(0.0, used / self._share - (self._clock() - self._since)))
            self.begin(self._share)


class YieldingThread:
    """Runs work on one core at most, at a priority that is lower by so many levels of nice.

    A parallel operation ends when the last of its threads does: one that copies tensors on every core makes
    every matrix product of an engine on them wait.
    """

    def __init__(self, levels: int) -> None:
        # A thread of its own, as no thread may raise its priority again.
        self._executor = ThreadPoolExecutor(1, "yielding", initializer=yield_to_others, initargs=(levels,))

    def run(self, work: Callable[[], T]) -> T:
        """Run it, and wait for its end."""
        threads = torch.get_num_threads()
        try:
            return self._executor.submit(_on_one_core, work).result()
        finally:
            torch.set_num_threads(threads)  # some libraries have one number for all threads


def _on_one_core(work: Callable[[], T]) -> T:
    torch.set_num_threads(1)
    return work()
