"""Who publishes, a trainer or a client over HTTP, and users."""

import asyncio
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from deployments.calls.publish_session import PublishSession, joined
from deployments.calls.rpc import retried
from deployments.protocol import errors
from deployments.protocol.publishing import JoinedLease, Lease, RoundOptions
from deployments.protocol.responses import FleetStatus
from deployments.protocol.routing import Demand
from deployments.router.replica_policy import Candidate, order_candidates
from tests.simulation.engine import Answer, EngineFailed
from tests.simulation.network import Handle, Unreachable
from tests.simulation.oracle import Oracle

if TYPE_CHECKING:
    from tests.simulation.world import World


FENCED_CALLS = ("connect", "open_round", "send", "abort_round", "release")  # a close comes from the record
PARTS = 2
PAUSE_S = 0.8  # between two updates
CALL_S = 25.0


class Trainer:
    """What `deployments.trainer.weight_publisher` does, without threads."""

    def __init__(
        self, name: str, controller: Handle, oracle: Oracle, rng: Random, write: Callable[[int, str], str]
    ) -> None:
        self._name, self._oracle, self._rng = name, oracle, rng
        self._controller = Watched(controller, oracle)
        self._write = write
        self._epoch: int | None = None
        self._attempts = 0
        self._writing: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PAUSE_S * (0.3 + self._rng.random()))
            self._attempts += 1
            await self._publish(f"{self._name}/{self._attempts}")

    async def _publish(self, attempt: str) -> None:
        closing = False
        try:
            fleet: FleetStatus = await retried(self._controller, "fleet")
            async with PublishSession(self._controller, "trainer") as session:  # type: ignore[arg-type]
                if fleet.connected != "trainer" or fleet.epoch != self._epoch:
                    self._epoch = None
                    await session.connect({})
                    self._epoch = fleet.epoch
                await session.open(RoundOptions())
                for part in range(PARTS):
                    await session.send({"attempt": attempt, "part": part, "parts": PARTS})
                closing = True
                report = await session.close(attempt)
                self._oracle.committed(report.version, attempt)
            self._writing.append(asyncio.get_running_loop().create_task(self._save(report.version, attempt)))
        except errors.SlipstreamError as error:
            self._epoch = None
            if not closing or isinstance(
                error, errors.Conflict | errors.RoundAborted | errors.InvalidRequest
            ):
                self._oracle.was_aborted(attempt, error)  # otherwise it may have been decided

    async def _save(self, version: int, attempt: str) -> None:
        await asyncio.sleep(0.4 + self._rng.random())
        try:
            path = self._write(version, attempt)
            for _ in range(5):
                try:
                    await self._controller.stored.remote(version, path, attempt)
                    return
                except (Unreachable, TimeoutError):
                    await asyncio.sleep(0.5)
        except (OSError, errors.SlipstreamError):
            return  # the controller's status says that it is missing


class HttpPublisher:
    """A client of vLLM's and `app.http.weight_routes`; a replica writes the store."""

    def __init__(self, name: str, controller: Handle, oracle: Oracle, rng: Random) -> None:
        self._name, self._oracle, self._rng = name, oracle, rng
        self._session: Any = partial(joined, Watched(controller, oracle), "http")
        self._attempts = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PAUSE_S * (0.3 + self._rng.random()))
            self._attempts += 1
            await self._publish(f"{self._name}/{self._attempts}")

    async def _publish(self, attempt: str) -> None:
        finishing, mine = False, None
        try:
            async with asyncio.timeout(3 * CALL_S):
                session = await self._session()
                if session.round_id is not None:
                    raise errors.Conflict("a round is open")
                await session.connect({})
                session = await self._session()
                if session.round_id is not None:
                    raise errors.Conflict("start_weight_update was called twice")
                await session.open(RoundOptions(persist=True))
                mine = session.round_id
                for part in range(PARTS):
                    session = await self._session(of_round=True)
                    if session.round_id is None:
                        raise errors.Conflict("no round is open")
                    await session.send({"attempt": attempt, "part": part, "parts": PARTS})
                finishing = True
                session = await self._session(of_round=True)
                # vLLM's calls carry no token: a close that comes late, when another publisher's round is
                # complete and not closed, is taken for that one's.
                is_mine = session.round_id == mine
                if session.round_id is None:
                    raise errors.Conflict("no round is open")
                report = await session.close(attempt)
                if is_mine:
                    self._oracle.committed(report.version, attempt)
        except (errors.RoundAborted, errors.InvalidRequest) as error:
            self._oracle.was_aborted(attempt, error)
        except (errors.SlipstreamError, Unreachable, TimeoutError) as error:
            if not finishing:
                self._oracle.was_aborted(attempt, error)


class Watched:
    """A publisher's handle of the controller: the oracle sees which token each call was accepted with."""

    def __init__(self, controller: Handle, oracle: Oracle) -> None:
        self._controller, self._oracle = controller, oracle

    def __getattr__(self, name: str) -> "WatchedMethod":
        return WatchedMethod(getattr(self._controller, name), name, self._oracle)


class WatchedMethod:
    def __init__(self, method: Any, name: str, oracle: Oracle) -> None:
        self._method, self._name, self._oracle = method, name, oracle

    async def remote(self, *args: Any) -> Any:
        newest = self._oracle.newest_token
        answer = await self._method.remote(*args)
        match answer:
            case Lease(token=token) | JoinedLease(lease=Lease(token=token)):
                self._oracle.holds(token)
        if self._name in FENCED_CALLS:
            self._oracle.accepted(self._name, args[0], newest)
        return answer


FIND_S = 20.0
ATTEMPT_S = 8.0
MAX_LOSSES = 2


async def one_request(world: "World") -> None:
    """What the router does with a request, as `Forwarder.forward` does it."""
    began = world.loop.now
    wants = world.oracle.newest_answer if world.rng.random() < 0.3 else 0
    refused: tuple[str, ...] = ()
    losses, why = 0, "no replica is ready"
    while world.loop.now - began < FIND_S:
        demand = Demand(min_version=wants, timeout_s=ATTEMPT_S, refused=refused)
        candidates = [
            Candidate(replica_id=name, version=each.stats[0], admitted=each.stats[1])
            for name, each in world.replicas.items()
        ]
        groups = order_candidates(candidates, demand)
        if not groups:
            await asyncio.sleep(0.3)
            continue
        name = groups[0][0]
        replica = world.replicas[name]
        seconds = 0.05 + world.rng.random() * 0.6
        try:
            call = world.network.call(
                lambda replica=replica: (replica.process, replica) if replica.process.alive else None,
                "answer",
                demand,
                seconds,
                reliable=True,
            )
            answer: Answer = await asyncio.wait_for(call, ATTEMPT_S + 2)
        except (errors.ReplicaUnavailable, errors.Conflict) as error:
            why = str(error)
        except (Unreachable, EngineFailed, TimeoutError) as error:
            why = f"{name} was lost: {error}"
            losses += 1
            if losses == MAX_LOSSES:
                return
        else:
            world.oracle.answered(name, began, answer.first, answer.last)
            return
        refused = (*refused, name)[-8:]
        await asyncio.sleep(0.05)
    world.oracle.not_answered(began, why)
