"""Hitting a phase of a round on purpose, and the fault itself.

    idle        no round
    staging     the publisher waits in the middle of its tensors; a trainer's round: an engine is stopped
    verifying   the publisher waits before it closes; a replica is made to stand still; then it closes
    deciding    the journal has the decision: the controller is made to stand still before it tells anybody
    committing  the journal has the decision: an engine is made to stand still before it can swap
    releasing   a few milliseconds later, the controller is made to stand still
    storing     the journal has the end of the round, and the store has not its version

The last two are windows of milliseconds, and hit only sometimes. Events tell in which phase the fault fell.
"""

import ctypes
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import psutil

from tests.chaos.arena import Arena
from tests.chaos.faults import OF_TRAINER, STOPPED_S, Action, Case, Phase
from tests.fleet.processes import engine_of
from tests.journal_copy import JournalCopy
from tests.waiting import until

HELD_S = 30.0
_SYS_PIDFD_GETFD = 438


def strike(arena: Arena, case: Case) -> float:
    """Do what the case says; returns when (seconds since the epoch), after the targets were resumed."""
    with arena.quiet():
        until(arena.whole, 60, "a whole fleet before the fault")
        victims, brake = _victims(arena, case)
        with in_phase(arena, case, brake):
            at = time.time()
            for victim in victims:
                _hit(victim, case.action)
        if case.action in STOPPED_S:
            time.sleep(max(0.0, at + STOPPED_S[case.action] - time.time()))
            for victim in victims:
                _resume(victim)
    return at


def _victims(arena: Arena, case: Case) -> tuple[list[psutil.Process], psutil.Process]:
    """The processes of the case, and one of another replica, which can hold a round: its engine.

    An engine is not asked when a round is verified: it has said what it received. Its replica is.
    """
    first, *_, last = arena.launched.named("replica")
    of_replica = {"replica": first, "engine": engine_of(first)}
    found = []
    for target in case.targets:
        if target in of_replica:
            found.append(of_replica[target])
        elif target == "publisher":
            arena.publisher.ensure()
            found.append(psutil.Process(arena.publisher.process.pid))
        else:
            found.append(arena.launched.named(target)[0])
    return found, last if case.phase is Phase.VERIFYING else engine_of(last)


@contextmanager
def in_phase(arena: Arena, case: Case, brake: psutil.Process) -> Iterator[None]:
    """A round that is held in the case's phase, and then continues."""
    if case.phase is Phase.IDLE:
        yield
        return
    if any(target in OF_TRAINER for target in case.targets):
        # So that it is connected with all members, which a trainer that has just come back is not.
        refused = arena.train()
        assert refused is None, refused
    if case.phase in (Phase.STAGING, Phase.VERIFYING):
        yield from _held(arena, case, brake)
        return
    journal = JournalCopy(arena.launched.state)
    controller = arena.launched.named("controller")[0]
    with _round(arena, case):
        journal.until("ended" if case.phase is Phase.STORING else "committed", HELD_S)
        match case.phase:
            case Phase.DECIDING:
                with _standing_still(controller):
                    yield
            case Phase.COMMITTING:
                with _standing_still(brake):
                    with suppress(TimeoutError):
                        until(lambda: arena.phase() == "committing", 1.0, "committing", pause_s=0.01)
                    yield
            case Phase.RELEASING:
                time.sleep(random.uniform(0.002, 0.02))
                with _standing_still(controller):
                    yield
            case _:
                yield


def _held(arena: Arena, case: Case, brake: psutil.Process) -> Iterator[None]:
    if any(target in OF_TRAINER for target in case.targets):
        with _standing_still(brake) as go, _round(arena, case):
            until(lambda: arena.phase() == "open", HELD_S, "the trainer's round")
            yield
            go.close()
        return
    where = "tensors" if case.phase is Phase.STAGING else "finish"
    arena.publisher.begin(arena.next_mark(), where)
    assert arena.publisher.until("held", HELD_S), "the round failed before the fault"
    if case.phase is Phase.STAGING:
        yield
        arena.publisher.go_on()
    else:
        with _standing_still(brake):
            arena.publisher.go_on()
            until(lambda: arena.phase() == "verifying", HELD_S, "verifying", pause_s=0.02)
            yield


@contextmanager
def _round(arena: Arena, case: Case) -> Iterator[None]:
    """A round that goes by itself, of the trainer if it is to be hit; its end is not waited for."""
    if any(target in OF_TRAINER for target in case.targets):
        threading.Thread(target=lambda: print("the trainer's round:", arena.train()), daemon=True).start()
    else:
        arena.publisher.begin(arena.next_mark())
    yield


@contextmanager
def _standing_still(process: psutil.Process) -> Iterator[ExitStack]:
    with ExitStack() as resumed:
        process.suspend()
        resumed.callback(_resume, process)
        yield resumed


def _resume(process: psutil.Process) -> None:
    with suppress(psutil.Error):
        process.resume()


def _hit(victim: psutil.Process, action: Action) -> None:
    with suppress(psutil.NoSuchProcess):  # a pair: the second may have gone with the first
        if action is Action.KILL:
            victim.kill()
        elif action in STOPPED_S:
            victim.suspend()
        else:
            cut_connections(victim.pid)


def cut_connections(pid: int) -> int:
    """Break the TCP connections of a process, as a network would; returns how many."""
    libc, cut = ctypes.CDLL(None, use_errno=True), 0
    pidfd = os.pidfd_open(pid)
    try:
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.status != psutil.CONN_ESTABLISHED:
                continue
            copy = libc.syscall(_SYS_PIDFD_GETFD, pidfd, connection.fd, 0)
            if copy < 0:
                continue  # closed meanwhile
            with socket.socket(fileno=copy) as owned, suppress(OSError):
                owned.shutdown(socket.SHUT_RDWR)
                cut += 1
    finally:
        os.close(pidfd)
    return cut
