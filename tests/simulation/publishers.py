"""Those who publish: the trainer, which writes its versions to the store, and an outside one over HTTP."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

from app.http.lease import HttpLease
from deployments.errors import (
    Conflict,
    FleetUnavailable,
    InvalidRequest,
    RoundAborted,
    SlipstreamError,
    StalePublisher,
)
from deployments.lost_calls import answered, is_lost
from deployments.protocol.publishing import Lease, RoundOptions, RoundReport
from deployments.protocol.status import FleetStatus
from tests.simulation.network import Handle, Unreachable
from tests.simulation.oracle import Oracle

FENCED_CALLS = ("connect", "open_round", "send", "abort_round", "release")  # a close comes from the record
PARTS = 2
PAUSE_S = 0.8  # between two updates
CALL_S = 25.0


class Trainer:
    """What `deployments.trainer.publisher` and its fleet client do, without threads."""

    def __init__(
        self,
        name: str,
        controller: Handle,
        oracle: Oracle,
        rng: Random,
        write: Callable[[int, str], str],
    ) -> None:
        self._name, self._controller, self._oracle, self._rng = name, controller, oracle, rng
        self._write = write
        self._lease: Lease | None = None
        self._epoch: int | None = None
        self._attempts = 0
        self._writing: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PAUSE_S * (0.3 + self._rng.random()))
            self._attempts += 1
            await self._publish(f"{self._name}/{self._attempts}")

    async def _publish(self, attempt: str) -> None:
        round_id: int | None = None
        closing = False
        try:
            fleet: FleetStatus = await self._call("fleet")
            connected = fleet.connection is not None and fleet.connection.publisher == "trainer"
            if not connected or fleet.epoch != self._epoch:
                self._epoch = None
                await self._call("connect", await self._token(), {})
                self._epoch = fleet.epoch
            round_id = await self._call("open_round", await self._token(), RoundOptions())
            for part in range(PARTS):
                payload = {"attempt": attempt, "part": part, "parts": PARTS}
                await self._call("send", await self._token(), round_id, payload)
            closing = True
            report = await self._close(round_id, attempt)
            self._oracle.committed(report.version, attempt)
            round_id = None
            with suppress(SlipstreamError, Unreachable, TimeoutError):  # it expires
                await self._release()
            self._writing.append(asyncio.get_running_loop().create_task(self._save(report.version, attempt)))
        except (RoundAborted, InvalidRequest) as error:
            self._oracle.was_aborted(attempt, error)
            await self._clean_up(round_id)
        except (SlipstreamError, Unreachable, TimeoutError) as error:
            if not closing or isinstance(error, StalePublisher | Conflict):
                self._oracle.was_aborted(attempt, error)  # never closed: nobody may serve it
            await self._clean_up(round_id)

    async def _close(self, round_id: int, attempt: str) -> RoundReport:
        """If the controller is lost meanwhile, its successor says what became of the round."""
        token, began = await self._token(), asyncio.get_running_loop().time()
        while True:
            try:
                report: RoundReport = await self._call("close_round", token, round_id, attempt)
                return report
            except (FleetUnavailable, Unreachable) as error:
                if not is_lost(error) or asyncio.get_running_loop().time() - began > CALL_S:
                    raise
                self._lease = None  # a successor knows no lease
            await asyncio.sleep(0.2)

    async def _save(self, version: int, attempt: str) -> None:
        await asyncio.sleep(0.4 + self._rng.random())
        try:
            path = self._write(version, attempt)
            for _ in range(5):
                try:
                    await self._call("stored", version, path, attempt)
                    return
                except (Unreachable, TimeoutError):
                    await asyncio.sleep(0.5)
        except (OSError, SlipstreamError):
            return  # the controller's status says that it is missing

    async def _clean_up(self, round_id: int | None) -> None:
        self._epoch = None
        with suppress(SlipstreamError, Unreachable, TimeoutError):
            if round_id is not None and self._lease is not None:
                await self._call("abort_round", self._lease.token, round_id, "failed")
        with suppress(SlipstreamError, Unreachable, TimeoutError):
            await self._release()

    async def _token(self) -> int:
        if self._lease is None:
            self._lease = await self._call("acquire", "trainer")
            self._oracle.holds(self._lease.token)
        return self._lease.token

    async def _release(self) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            await self._call("release", lease.token)

    async def _call(self, method: str, *args: Any) -> Any:
        """Renews the lease until the call answers."""
        newest, token = self._oracle.newest_token, args[0] if method in FENCED_CALLS else None
        response = getattr(self._controller, method).remote(*args)
        async with asyncio.timeout(CALL_S):
            while self._lease is not None and not response.done():
                await asyncio.wait({response}, timeout=self._lease.duration_s / 3)
                if not response.done():
                    try:
                        await self._controller.renew.remote(self._lease.token)
                    except StalePublisher:
                        if method != "close_round":
                            raise
                        self._lease, response = None, self._controller.close_round.remote(*args)
            answer = await response
            if token is not None:
                self._oracle.accepted(method, token, newest)
            return answer


class HttpPublisher:
    """A client of vLLM's and `app.http.weight_routes`, with the real lease; a replica writes the store."""

    def __init__(
        self,
        name: str,
        controller: Handle,
        oracle: Oracle,
        rng: Random,
    ) -> None:
        self._name, self._controller, self._oracle, self._rng = name, controller, oracle, rng
        self._lease = HttpLease(controller, renew_s=2.0)  # type: ignore[arg-type]
        self._attempts = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PAUSE_S * (0.3 + self._rng.random()))
            self._attempts += 1
            await self._publish(f"{self._name}/{self._attempts}")

    async def _publish(self, attempt: str) -> None:
        finishing = False
        try:
            async with asyncio.timeout(3 * CALL_S):
                async with self._lease.session() as session:
                    self._oracle.holds(session.token)
                    if session.round_id is not None:
                        raise Conflict("a round is open")
                    await self._controller.connect.remote(session.token, {})
                async with self._lease.session() as session:
                    self._oracle.holds(session.token)
                    if session.round_id is not None:
                        raise Conflict("start_weight_update was called twice")
                    mine = session.token
                    await self._controller.open_round.remote(mine, RoundOptions(persist=True))
                for part in range(PARTS):
                    async with self._lease.session(of_round=True) as session:
                        payload = {"attempt": attempt, "part": part, "parts": PARTS}
                        if session.round_id is None:
                            raise Conflict("no round is open")
                        send = self._controller.send.remote(session.token, session.round_id, payload)
                        await self._lease.renewing(session.token, send)
                finishing = True
                async with self._lease.session(of_round=True) as session:
                    token, round_id = session.token, session.round_id
                    if round_id is None:
                        raise Conflict("no round is open")
                    report = await answered(
                        lambda: self._controller.close_round.remote(token, round_id, attempt),
                        "close_round",
                    )
                    # vLLM's calls carry no token: a close that comes late, when another publisher's round is
                    # complete and not closed, is taken for that one's.
                    if token == mine:
                        self._oracle.committed(report.version, attempt)
        except (RoundAborted, InvalidRequest) as error:
            self._oracle.was_aborted(attempt, error)
        except (SlipstreamError, Unreachable, TimeoutError) as error:
            if not finishing:
                self._oracle.was_aborted(attempt, error)
