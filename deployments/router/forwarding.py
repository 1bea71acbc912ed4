"""Sends a request to one replica after another until one responds.

Serve's request router chooses the replica; bytes go directly to the replica's HTTP server.
"""

import asyncio
import json
import math
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import aiohttp
from multidict import CIMultiDict
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.host import tracing
from deployments.host.logs import serve_logger
from deployments.protocol import routing
from deployments.protocol.errors import DeadlyRequest, FleetUnavailable
from deployments.protocol.rollouts import TURN_HEADER, RolloutRequest
from deployments.protocol.routing import Demand, ReplicaEndpoint
from deployments.router.affinity import Affinity
from deployments.router.deadly_requests import DeadlyRequests, RequestIdentity
from deployments.router.http_client import ConnectionPool, NotConnected, ReplicaResponse, ResponseLost
from deployments.router.replica_policy import LOAD_FACTOR, load_of
from deployments.router.scrape import Scraped, scrape
from deployments.serve.instruments import REROUTED, WAITED, WAITED_SECONDS, Record, record

RETRY_AFTER_S = 1.0  # minimum that clients are told
RETRY_PAUSE_S = 0.05
LEAVES_S = 2.0  # a lost replica leaves the routing within this time
WAITED_S = 0.1  # choosing takes less if a replica is free
MAX_REFUSALS = 8  # per request
CENSUS_TIMEOUT_S = 1.0  # no remote call: it returns at once, or no replica is admitted
SILENCE_S = 30.0
PROBE_TIMEOUT_S = 30.0  # tokenizing a long list of prompts takes seconds
logger = serve_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLimits:
    max_ongoing_requests: int  # a split request counts once
    max_body_bytes: int
    request_timeout_s: float  # limits the search for a replica; default of x-weight-timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    method: str
    target: str  # path and query
    headers: CIMultiDict[str]  # without the fleet's key
    body: bytes
    sequences: int
    identity: RequestIdentity
    blocks: Sequence[int] = ()
    turn: RolloutRequest | None = None

    @property
    def load(self) -> int:
        return load_of(self.sequences, self.body)


@dataclass(slots=True, kw_only=True)
class AttemptHistory:
    demand: Demand
    lost: list[str] = field(default_factory=list)

    def avoid(self, replica_id: str) -> None:
        self.demand = replace(self.demand, refused=(*self.demand.refused, replica_id)[-MAX_REFUSALS:])

    def waited(self, request: Outgoing, attempt_s: float) -> float:
        """The next replica waits for the version for what is left. Returns what this one took of it."""
        waited_s = min(attempt_s, self.demand.timeout_s)
        self.demand = replace(self.demand, timeout_s=self.demand.timeout_s - waited_s)
        request.headers["x-weight-timeout"] = str(self.demand.timeout_s)
        return waited_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedResponse:
    replica_id: str
    response: ReplicaResponse
    whole: bytes | None  # the whole body; None: a stream
    connection: AsyncExitStack

    async def body(self) -> bytes:
        """Raises `ResponseLost`."""
        return await self.response.rest() if self.whole is None else self.whole


class _NotBegun(Exception):
    """Refused or unreachable; its engine never had the request."""


class _Lost(Exception):
    """Lost after it had the request."""


class Forwarder:
    """A response silent for `silence_s` is probed."""

    def __init__(
        self,
        rollout: DeploymentHandle,
        *,
        silence_s: float,
        probe_timeout_s: float,
        record: Record = record,
    ) -> None:
        self._record = record
        self._rollout = rollout
        self._silence_s = silence_s
        self._probe_timeout_s = probe_timeout_s
        self._affinity = Affinity()
        self._in_flight: Counter[str] = Counter()
        self._router_id = uuid.uuid4().hex
        self._connections = ConnectionPool()
        self._probes: dict[str, asyncio.Task[bool]] = {}
        self._session: aiohttp.ClientSession | None = None
        self.deadly = DeadlyRequests()

    async def close(self) -> None:
        self._connections.close()
        if self._session is not None:
            await self._session.close()

    async def loads(self, demand: Demand) -> dict[str, int]:
        return (await self._census(demand)).loads

    async def metrics(self, names: Sequence[str] = ()) -> Scraped:
        """From all replicas, admitted or not, and all nodes; with `names` these metrics of replicas."""
        known = (await self._census(Demand())).metadata
        replicas = {name: ReplicaEndpoint(**known[name]) for name in known}
        return await scrape(self._probe_session(), replicas, names)

    async def forward(
        self, request: Outgoing, attempts: AttemptHistory, limits: RouterLimits
    ) -> StartedResponse:
        """The first response that is no refusal. Raises FleetUnavailable after `request_timeout_s`, or
        DeadlyRequest."""
        deadline = time.monotonic() + limits.request_timeout_s
        reason = "no replica is ready"
        started, tried_s, lost_at = time.monotonic(), 0.0, -math.inf
        self.deadly.check(request.identity)
        while True:
            try:
                replica_id, endpoint = await self._choose(attempts.demand, request.blocks, deadline)
            except (BackPressureError, DeploymentUnavailableError) as error:
                reason = one_line(error)
            except TimeoutError:
                pass
            else:
                self.deadly.check(request.identity)  # the choice may have taken long
                began = time.monotonic()
                if replica_id in attempts.lost and began < lost_at + LEAVES_S:
                    await asyncio.sleep(RETRY_PAUSE_S)  # it may be dead: then a refusal is no second loss
                    continue
                try:
                    response = await self._attempt(replica_id, endpoint, request)
                    self._count_wait(began - started - tried_s)
                    return response
                except _NotBegun as error:
                    reason = str(error)
                    self._record(REROUTED, reason="refused")
                    attempts.avoid(replica_id)
                    if attempts.demand.min_version > 0:
                        deadline += attempts.waited(request, time.monotonic() - began)
                except _Lost as error:
                    reason, lost_at = str(error), time.monotonic()
                    self._record(REROUTED, reason="lost")
                    self.count_loss(request, attempts, replica_id, reason)
                    deadline += time.monotonic() - began  # generation time does not count
                tried_s += time.monotonic() - began
            if time.monotonic() > deadline:
                raise FleetUnavailable(
                    f"no replica could answer within {limits.request_timeout_s:g} s: {reason}",
                    {"retry_after_s": RETRY_AFTER_S},
                )
            await asyncio.sleep(RETRY_PAUSE_S)

    def _count_wait(self, waited_s: float) -> None:
        if waited_s > WAITED_S:
            self._record(WAITED)
            self._record(WAITED_SECONDS, waited_s)

    def count_loss(self, request: Outgoing, attempts: AttemptHistory, replica_id: str, reason: str) -> None:
        attempts.lost.append(replica_id)
        attempts.avoid(replica_id)
        try:
            self.deadly.lost(request.identity, attempts.lost)
        except DeadlyRequest as refused:
            method, path = request.identity.method, request.identity.path
            logger.error("%s %s is refused: %s; %s", method, path, refused.message, reason)
            raise

    async def _census(self, demand: Demand) -> routing.Census:
        census = routing.Census()
        # `forward` waits for an admitted replica and reports the reason.
        with suppress(TimeoutError, BackPressureError, DeploymentUnavailableError):
            await self._ask_serve(replace(demand, census=census), time.monotonic() + CENSUS_TIMEOUT_S)
        return census

    async def _choose(
        self, demand: Demand, blocks: Sequence[int], deadline: float
    ) -> tuple[str, ReplicaEndpoint]:
        choice = routing.Choice()
        current = replace(
            demand,
            home=self._affinity.home(demand.session_id),
            holders=partial(self._affinity.holders, blocks),
            load_factor=LOAD_FACTOR,
            choice=choice,
        )
        replica_id, endpoint = await self._ask_serve(current, deadline)
        self._affinity.sent(replica_id, choice.version, session_id=demand.session_id, blocks=blocks)
        return replica_id, endpoint

    async def _ask_serve(self, demand: Demand, deadline: float) -> tuple[str, ReplicaEndpoint]:
        current = replace(demand, router=self._router_id, in_flight=dict(self._in_flight))
        async with asyncio.timeout(deadline - time.monotonic()):
            # A reservation costs two calls to the replica; our own count is more exact.
            async with self._rollout.choose_replica(current, _reserve=False) as chosen:
                return chosen.replica_id, ReplicaEndpoint(**chosen.replica_metadata)

    async def _attempt(
        self, replica_id: str, endpoint: ReplicaEndpoint, request: Outgoing
    ) -> StartedResponse:
        try:
            async with AsyncExitStack() as connection:
                response = await connection.enter_async_context(self._send(replica_id, endpoint, request))
                stall = detect_stall(response, partial(self._is_alive, endpoint), self._silence_s)
                connection.callback(asyncio.create_task(stall).cancel)
                await response.begin()
                refusal = response.header(routing.REFUSED_HEADER)
                if refusal is not None:
                    reason = json.loads(await response.rest())["error"]["message"]
                    raise _Lost(reason) if refusal == routing.LOST else _NotBegun(reason)
                # A replica that is lost here can still be replaced.
                whole = None if response.content_length is None else await response.rest()
                return StartedResponse(
                    replica_id=replica_id, response=response, whole=whole, connection=connection.pop_all()
                )
        except NotConnected as error:
            raise _NotBegun(f"replica {replica_id} does not answer: {error}") from error
        except ResponseLost as error:
            # The engine may have begun: count it as a loss.
            raise _Lost(f"replica {replica_id} does not answer: {error}") from error

    @asynccontextmanager
    async def _send(
        self, replica_id: str, endpoint: ReplicaEndpoint, request: Outgoing
    ) -> AsyncIterator[ReplicaResponse]:
        headers = request.headers.copy()
        headers[routing.KEY_HEADER.decode()] = endpoint.key
        headers[routing.ROUTER_HEADER.decode()] = routing.router_header(self._router_id, request.load)
        if request.turn is not None:  # later attempts replace earlier ones
            headers[TURN_HEADER.decode()] = request.turn.header(time.time_ns())
        headers.update(tracing.headers())
        self._in_flight[replica_id] += request.load
        try:
            async with self._connections.request(
                endpoint.address, request.method, request.target, [*headers.items()], request.body
            ) as response:
                yield response
        finally:
            self._in_flight[replica_id] -= request.load

    async def _is_alive(self, endpoint: ReplicaEndpoint) -> bool:
        """Waiting requests share one probe."""
        address = endpoint.address
        if address not in self._probes:
            self._probes[address] = asyncio.create_task(self._probe(endpoint))
            self._probes[address].add_done_callback(lambda _: self._probes.pop(address, None))
        return await asyncio.shield(self._probes[address])

    async def _probe(self, endpoint: ReplicaEndpoint) -> bool:
        """Any status counts: the server has no route `/`."""
        timeout = aiohttp.ClientTimeout(total=self._probe_timeout_s)
        headers = {routing.KEY_HEADER.decode(): endpoint.key}
        url = f"http://{endpoint.address}/"
        try:
            async with self._probe_session().get(url, headers=headers, timeout=timeout):
                return True
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _probe_session(self) -> aiohttp.ClientSession:
        if self._session is None:  # made in the event loop that serves requests
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None)
            )
        return self._session


async def detect_stall(
    response: ReplicaResponse, is_alive: Callable[[], Awaitable[bool]], silence_s: float
) -> None:
    """Abort a response that is silent for `silence_s` if its replica fails a probe.

    Responses that are not streamed are silent during generation. Stopped processes and unreachable hosts do
    not close connections.
    """
    loop = asyncio.get_running_loop()
    while True:
        heard_at = response.heard_at
        await asyncio.sleep(heard_at + silence_s - loop.time())
        if response.heard_at == heard_at and not await is_alive() and response.heard_at == heard_at:
            response.give_up("it is silent, and does not answer a probe either")
            return
        if response.heard_at == heard_at:
            await asyncio.sleep(silence_s)


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
