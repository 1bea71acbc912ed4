"""A thread that lowers its priority lowers no other's."""

import os
import sys
import threading

import pytest
import torch

from deployments.host.thread_priority import CoreShare, YieldingThread, yield_to_others


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


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_core_is_left_alone_until_the_share_of_it_is_kept() -> None:
    clock, used = Clock(), Clock()
    waited: list[float] = []
    share = CoreShare(clock, used, waited.append)
    share.begin(0.25)
    clock.now, used.now = 1.0, 1.0
    share.rest()
    clock.now, used.now = 6.0, 2.0  # the work had no core for most of the time
    share.rest()
    clock.now, used.now = 6.5, 2.5
    share.rest()
    assert waited == pytest.approx([3.0, 0.0, 1.5])


def test_a_share_of_one_never_waits() -> None:
    clock, used = Clock(), Clock()
    waited: list[float] = []
    share = CoreShare(clock, used, waited.append)
    clock.now, used.now = 1.0, 1.0
    share.rest()
    assert waited == []


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux")
def test_the_work_yields_and_its_caller_does_not() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before, threads = priority(), torch.get_num_threads()
    thread = YieldingThread(3)
    for _ in range(2):
        assert thread.run(lambda: (priority(), torch.get_num_threads())) == (before + 3, 1)
        assert (priority(), torch.get_num_threads()) == (before, threads)


def test_what_the_work_raises_is_raised() -> None:
    threads = torch.get_num_threads()

    def fail() -> None:
        raise OSError("the fleet is gone")

    with pytest.raises(OSError, match="the fleet is gone"):
        YieldingThread(3).run(fail)
    assert torch.get_num_threads() == threads
