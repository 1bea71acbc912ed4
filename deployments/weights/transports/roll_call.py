"""Who is missing from a group of ranks in which something failed.

When one member of a collective transfer stands still, all others fail, and their errors say nothing about
whose fault it is. So each member that has failed says so in the group's store, those that still wait see it,
fail too and say so, and whoever has said nothing after a while is named. Those that have finished what the
others wait in are not missing.

A store whose host stands still answers nothing, for as long as it does. So a thread of its own talks to it,
and nobody waits for that thread longer than for the answers.
"""

import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

ROLL_CALL_S = 1.0
HOST_S = 1.5  # rank 0 has the store, and leaves last
_POLL_S = 0.02
_LISTEN_S = 0.25
_FAILED = "failed"


class GroupStore(Protocol):
    """What torch's stores offer here; each call may raise RuntimeError."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


class RollCall:
    """One member's part.

    Args:
        store: of the group.
    """

    def __init__(self, store: GroupStore, rank: int, world_size: int) -> None:
        self._talk = _Talk(store, rank, world_size)
        self._limit_s = HOST_S if rank == 0 else ROLL_CALL_S
        weakref.finalize(self, self._talk.close)
        threading.Thread(target=self._talk.run, name="roll-call", daemon=True).start()

    def is_called(self) -> bool:
        """Whether a member has failed. To be asked while this member waits for the others."""
        if not self._talk.listening:
            self._talk.listening = True
            self._talk.wake.set()
        return self._talk.called

    def finished(self, broadcasts: int) -> None:
        """Say that this member has finished so many since the group was formed."""
        self._talk.listening, self._talk.finished = False, broadcasts
        self._talk.wake.set()

    def missing(self, started: int, check: Callable[[], None] = lambda: None) -> tuple[int, ...]:
        """Say that this member is there, wait for the others, and return the ranks that are missing.

        Empty if all answered, or if the store cannot be reached: then this member cannot say who is missing.

        Args:
            started: broadcasts since the group was formed, with the one that failed.
            check: raises to end the wait; called every few milliseconds.
        """
        deadline = time.monotonic() + self._limit_s
        self._talk.ask(started, deadline)
        while not self._talk.answered.wait(_POLL_S) and time.monotonic() < deadline + self._limit_s:
            check()
        return self._talk.absent if self._talk.answered.is_set() else ()


class _Talk:
    """What is said in the store. Its thread alone uses the store."""

    def __init__(self, store: GroupStore, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self.called = self.listening = self._closed = False
        self.finished = self._said = 0
        self.wake, self.answered = threading.Event(), threading.Event()
        self.absent: tuple[int, ...] = ()
        self._asked: tuple[int, float] | None = None  # broadcasts, and until when to wait

    def ask(self, started: int, deadline: float) -> None:
        self._asked = started, deadline
        self.wake.set()

    def close(self) -> None:
        self._closed = True
        self.wake.set()

    def run(self) -> None:
        try:
            while not self._closed:
                self._speak()
                self.wake.wait(_LISTEN_S if self.listening else None)
                self.wake.clear()
        except RuntimeError:  # torch has no finer class: the store is gone, and nobody can be named
            self.absent = ()
        self.answered.set()

    def _speak(self) -> None:
        if self._said != self.finished:
            self._said = self.finished
            self._store.set(f"finished/{self._rank}", str(self._said))
        if self.listening and not self.called:
            self.called = self._store.check([_FAILED])
        if self._asked is not None and not self.answered.is_set():
            self._store.set(f"{_FAILED}/{self._rank}", "")
            self._store.set(_FAILED, "")
            self.absent = self._wait(*self._asked)
            self.answered.set()

    def _wait(self, started: int, deadline: float) -> tuple[int, ...]:
        absent = tuple(range(self._world_size))
        while absent and time.monotonic() < deadline and not self._closed:
            absent = tuple(rank for rank in absent if not self._has_answered(rank, started))
            time.sleep(_POLL_S if absent else 0)
        return absent

    def _has_answered(self, rank: int, started: int) -> bool:
        if self._store.check([f"{_FAILED}/{rank}"]):
            return True
        finished = f"finished/{rank}"
        return self._store.check([finished]) and int(self._store.get(finished)) >= started
