"""Asks Serve for a replica, with what this router knows: what it has in flight, and what it sent where."""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.protocol.routing import Census, Choice, Demand, ReplicaEndpoint
from deployments.router.choice.affinity import Affinity
from deployments.router.limits import RouterLimits

CENSUS_TIMEOUT_S = 1.0  # which asks nobody: it is at once, or there is no replica


class Chooser:
    """The choice of replicas of one deployment by one router."""

    def __init__(self, rollout: DeploymentHandle) -> None:
        self._rollout = rollout
        self._affinity = Affinity()
        self._in_flight: Counter[str] = Counter()  # load, by replica
        self.router_id = uuid.uuid4().hex  # by which replicas count what they have of each router

    async def census(self, demand: Demand) -> Census:
        """The replicas that Serve knows; empty if none may answer."""
        census = Census()
        # Without a replica that may answer, forwarding waits for one, and says what is wrong.
        with suppress(TimeoutError, BackPressureError, DeploymentUnavailableError):
            await self._ask(replace(demand, census=census), time.monotonic() + CENSUS_TIMEOUT_S)
        return census

    async def choose(
        self, demand: Demand, blocks: Sequence[int], limits: RouterLimits, deadline: float
    ) -> tuple[str, ReplicaEndpoint]:
        """The id and the endpoint of the replica to try; waits while there is none.

        It is remembered as the home of the session and a holder of the prompt.

        Args:
            blocks: hashes of the beginning of the prompt, see `prefixes`.
            deadline: `time.monotonic`.

        Raises:
            TimeoutError: there was none until the deadline.
        """
        session_id, choice = demand.session_id, Choice()
        current = replace(
            demand,
            home=self._affinity.home(session_id),
            holders=partial(self._affinity.holders, blocks),
            load_factor=limits.load_factor,
            choice=choice,
        )
        replica_id, endpoint = await self._ask(current, deadline)
        self._affinity.sent(replica_id, choice.version, session_id=session_id, blocks=blocks)
        return replica_id, endpoint

    @contextmanager
    def counted(self, replica_id: str, load: int) -> Iterator[None]:
        """A request is in flight at a replica, with so much load."""
        self._in_flight[replica_id] += load
        try:
            yield
        finally:
            self._in_flight[replica_id] -= load

    async def _ask(self, demand: Demand, deadline: float) -> tuple[str, ReplicaEndpoint]:
        current = replace(demand, router=self.router_id, in_flight=dict(self._in_flight))
        async with asyncio.timeout(deadline - time.monotonic()):
            # Without a reservation: it costs two calls to the replica, and our own count is more exact.
            async with self._rollout.choose_replica(current, _reserve=False) as chosen:
                return chosen.replica_id, ReplicaEndpoint(**chosen.replica_metadata)
