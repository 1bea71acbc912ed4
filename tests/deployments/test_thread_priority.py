"""A thread that lowers its priority lowers no other's."""

import os
import sys
import threading

import pytest

from deployments.thread_priority import yield_to_others


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux")
def test_only_the_calling_thread_yields() -> None:
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    found: list[int] = []

    def work() -> None:
        yield_to_others(2)
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before + 2]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
