"""Sends one request to one replica after another, until one of them answers.

Serve's request router chooses the replica. The request and its answer go over a connection to that replica's
own HTTP server. What a replica refuses, or loses before its answer has begun, is sent to another one. A
request under which replicas are lost again and again is refused.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import aiohttp
from multidict import CIMultiDict
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.host.logs import serve_logger
from deployments.protocol.errors import DeadlyRequest, FleetUnavailable
from deployments.protocol.routing import (
    KEY_HEADER,
    LOST,
    REFUSED_HEADER,
    ROUTER_HEADER,
    Demand,
    ReplicaEndpoint,
    router_header,
)
from deployments.router.choice.chooser import Chooser
from deployments.router.choice.policy import load_of
from deployments.router.connections import Connections, NotConnected, Patience, Probes, questions
from deployments.router.deadly_requests import DeadlyRequests, RequestIdentity
from deployments.router.exchange import Answer, ExchangeLost
from deployments.router.limits import RETRY_AFTER_S, RouterLimits
from deployments.router.scrape import Scraped, scrape

RETRY_PAUSE_S = 0.05
MAX_REFUSALS = 8  # that a request remembers
logger = serve_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A request, or a part of one, as a replica gets it.

    Attributes:
        target: path and query.
        headers: without the fleet's key.
        sequences: how many it asks for.
        blocks: hashes of the beginning of its prompt, see `prefixes`.
        identity: of the client's request; what is refused as deadly is refused as a whole.
    """

    method: str
    target: str
    headers: CIMultiDict[str]
    body: bytes
    sequences: int
    identity: RequestIdentity
    blocks: Sequence[int] = ()

    @property
    def load(self) -> int:
        """What it adds to the load of a replica."""
        return load_of(self.sequences, self.body)


@dataclass(slots=True, kw_only=True)
class Trail:
    """Where a request has been: it is kept when the same request is forwarded again."""

    demand: Demand
    lost: list[str] = field(default_factory=list)  # replicas that were lost under it

    def refused(self, replica_id: str) -> None:
        """It is not to be sent there again, if there is another one."""
        self.demand = replace(self.demand, refused=(*self.demand.refused, replica_id)[-MAX_REFUSALS:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The answer of a replica has begun. Closing `connection` early ends the request in the engine.

    Attributes:
        whole: the body, if it has arrived already; None: it is a stream.
    """

    replica_id: str
    answer: Answer
    whole: bytes | None
    patience: Patience
    connection: AsyncExitStack

    async def body(self) -> bytes:
        """The whole body.

        Raises:
            ExchangeLost: the replica was lost.
        """
        return await self.answer.rest() if self.whole is None else self.whole


class _NotBegun(Exception):
    """A replica refuses the request, or cannot be reached; its engine never had it."""


class _Lost(Exception):
    """A replica was lost, or its engine failed, after the request had reached it."""


class Forwarder:
    """The way to the replicas, with what this router replica knows of them."""

    def __init__(self, rollout: DeploymentHandle, *, silence_s: float, probe_timeout_s: float) -> None:
        self._silence_s = silence_s
        self._probe_timeout_s = probe_timeout_s
        self._probes = Probes(self._answers)
        self._chooser = Chooser(rollout)
        self._connections = Connections()
        self._session: aiohttp.ClientSession | None = None
        self.deadly = DeadlyRequests()

    async def close(self) -> None:
        """Close the connections to the replicas."""
        self._connections.close()
        if self._session is not None:
            await self._session.close()

    async def loads(self, demand: Demand) -> dict[str, int]:
        """The load of each replica that may answer; empty if none is there."""
        return (await self._chooser.census(demand)).loads

    async def metrics(self) -> Scraped:
        """The metrics of every replica, whether it may answer requests or not, and of every node."""
        known = (await self._chooser.census(Demand())).metadata
        return await scrape(self._questions(), {name: ReplicaEndpoint(**known[name]) for name in known})

    async def forward(self, request: Outgoing, trail: Trail, limits: RouterLimits) -> Begun:
        """The first answer that is not a refusal; tries replica after replica.

        Raises:
            FleetUnavailable: `find_replica_timeout_s` went by without a replica that could answer.
            DeadlyRequest: replicas were lost under it.
        """
        deadline = time.monotonic() + limits.find_replica_timeout_s
        reason = "no replica is ready"
        self.deadly.check(request.identity)
        while True:
            try:
                replica_id, endpoint = await self._chooser.choose(
                    trail.demand, request.blocks, limits, deadline
                )
            except (BackPressureError, DeploymentUnavailableError) as error:
                reason = first_line(error)
            except TimeoutError:
                pass  # no replica could be chosen: the last reason says why
            else:
                self.deadly.check(request.identity)  # again: it may have waited long for a replica
                began = time.monotonic()
                try:
                    return await self._attempt(replica_id, endpoint, request)
                except _NotBegun as error:
                    reason = str(error)
                    trail.refused(replica_id)
                except _Lost as error:
                    reason = str(error)
                    self.count_loss(request, trail, replica_id, reason)
                    deadline += time.monotonic() - began  # its engine was at work: that was no search
            if time.monotonic() > deadline:
                raise FleetUnavailable(
                    f"no replica could answer within {limits.find_replica_timeout_s:g} s: {reason}",
                    {"retry_after_s": RETRY_AFTER_S},
                )
            await asyncio.sleep(RETRY_PAUSE_S)

    def count_loss(self, request: Outgoing, trail: Trail, replica_id: str, reason: str) -> None:
        """A replica was lost under a request; returns if the request may be tried again.

        Raises:
            DeadlyRequest: it was the last one that this request may cost.
        """
        trail.lost.append(replica_id)
        trail.refused(replica_id)
        identity, lost = request.identity, trail.lost
        try:
            self.deadly.lost(identity, lost)
        except DeadlyRequest as refused:
            logger.error("%s %s is refused: %s; %s", identity.method, identity.path, refused.message, reason)
            raise

    async def _attempt(self, replica_id: str, endpoint: ReplicaEndpoint, request: Outgoing) -> Begun:
        """The answer of one replica.

        Raises:
            _NotBegun: the replica refuses the request, or cannot be reached.
            _Lost: the request reached the replica, which then failed.
        """
        try:
            async with AsyncExitStack() as connection:
                async with asyncio.timeout(None) as limit:
                    patience = self._patience(endpoint, lambda: limit.reschedule(0))
                    connection.callback(patience.close)
                    answer = await connection.enter_async_context(
                        self._request(replica_id, endpoint, request)
                    )
                    patience.follow(answer)
                    refusal = answer.header(REFUSED_HEADER)
                    if refusal is not None:
                        reason = json.loads(await answer.rest())["error"]["message"]
                        raise _Lost(reason) if refusal == LOST else _NotBegun(reason)
                    # A replica that is lost here can still be replaced.
                    whole = None if answer.content_length is None else await answer.rest()
                patience.give_up = answer.close
                return Begun(
                    replica_id=replica_id,
                    answer=answer,
                    whole=whole,
                    patience=patience,
                    connection=connection.pop_all(),
                )
        except NotConnected as error:
            raise _NotBegun(f"replica {replica_id} does not answer: {error}") from error
        except ExchangeLost as error:
            # Whether its engine had begun, a broken connection does not say: it counts.
            raise _Lost(f"replica {replica_id} does not answer: {error}") from error
        except TimeoutError as error:
            raise _Lost(f"replica {replica_id} is silent, and answers nothing else either") from error

    def _patience(self, endpoint: ReplicaEndpoint, give_up: Callable[[], None]) -> Patience:
        return Patience(lambda: self._probes.alive(endpoint.address, endpoint.key), give_up, self._silence_s)

    async def _answers(self, address: str, key: str) -> bool:
        """Whether a replica's server answers; what, is all the same: it has no route `/`."""
        timeout = aiohttp.ClientTimeout(total=self._probe_timeout_s)
        headers = {KEY_HEADER.decode(): key}
        try:
            async with self._questions().get(f"http://{address}/", headers=headers, timeout=timeout):
                return True
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _questions(self) -> aiohttp.ClientSession:
        if self._session is None:  # created here, in the event loop that serves requests
            self._session = questions()
        return self._session

    @asynccontextmanager
    async def _request(
        self, replica_id: str, endpoint: ReplicaEndpoint, request: Outgoing
    ) -> AsyncIterator[Answer]:
        headers = request.headers.copy()
        headers[KEY_HEADER.decode()] = endpoint.key
        headers[ROUTER_HEADER.decode()] = router_header(self._chooser.router_id, request.load)
        with self._chooser.counted(replica_id, request.load):
            async with self._connections.asked(
                endpoint.address, request.method, request.target, [*headers.items()], request.body
            ) as answer:
                yield answer


def first_line(error: BaseException) -> str:
    """An error of somebody else's as one line."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
