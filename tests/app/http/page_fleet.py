"""A fleet to look at: our routes on a socket, over the real controller and replicas without tensors, in time.

It publishes when it is told to. Its engines generate at a steady rate, but for a gap at each commit.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from app.http.auth import Guard
from app.http.ingress import build_app
from app.http.prometheus import GENERATED, KV_CACHE, RUNNING, WAITING
from deployments.calls.http_server import HttpServer
from deployments.protocol.engine_state import is_paused
from deployments.protocol.ledger_config import LedgerConfig
from deployments.protocol.poll import Commit, Swapped
from deployments.protocol.poll import Receive as ReceivePayload
from deployments.protocol.publishing import RoundReport
from deployments.protocol.responses import ACCEPTED, DRAFTED, RolloutSample, StepEntry, StepLog, TrainerStatus
from deployments.router.scrape import Scraped
from deployments.weights.store.versions import MANIFEST, Store, VersionManifest
from tests.app.http.fake_controller import Handle
from tests.app.http.fake_trainer import STATUS, FakeTrainer
from tests.app.http.serving import tokens
from tests.deployments.controller.fleet import Fleet
from tests.deployments.ledger.fake_replica import FakeReplica
from tests.loop_thread import LoopThread

TOKEN = "operator-0123456789"
RATE = 1200.0  # tokens per second and replica
GAP_S = 0.3


class TimedReplica(FakeReplica):
    """Its engine generates, in real time."""

    generated = 0.0

    def carry_out(self, body: Any) -> Any:
        value = super().carry_out(body)
        if isinstance(body, Commit):
            self.generated -= GAP_S * RATE
            return Swapped(swap_s=0.02, gap_s=GAP_S)
        return replace(value, size_bytes=270_000_000) if hasattr(value, "size_bytes") else value


class TimedFleet(Fleet):
    """The controller reads the real clock."""

    now = property(lambda self: time.monotonic(), lambda self, value: None)  # type: ignore[assignment]

    async def _follow(self, replica: FakeReplica) -> None:
        while replica.fenced is None:
            directive = await self.controller.poll(replica.report())
            if any(isinstance(each.body, ReceivePayload) for each in directive.instructions):
                await asyncio.sleep(0.1)
            replica.take(directive)
        await self.controller.poll(replica.report())


class PageFleet:
    """Two replicas and a trainer. `address` is the page's.

    Args:
        prefix: the path at which a proxy puts the fleet.
        token: of the operator.
    """

    def __init__(self, directory: Path, *, prefix: str = "", token: str | None = None) -> None:
        self._fleet = self._made(directory)
        self._log, self._steps = list[StepEntry](), 0
        self._random = random.Random(0)
        app: ASGIApp = build_app(
            Guard(tokens(token)),
            _Model(),
            Handle(self),  # type: ignore[arg-type]
            Handle(self.Trainer(self)),  # type: ignore[arg-type]
            scrape=self._scrape,
            checkpoint_roots=[directory],
        )
        if prefix:
            app = _Prefixed(app, prefix)
        self._server = HttpServer(app, "127.0.0.1")
        self.address = f"http://{self._server.address}{prefix}/"
        self._generating = asyncio.create_task(self._generate())

    class Trainer(FakeTrainer):
        """Rolls back by a round, and keeps what was reported."""

        def __init__(self, fleet: "PageFleet") -> None:
            super().__init__()
            self._fleet = fleet

        async def rollback(self, version: int) -> RoundReport:
            return await self._fleet.publish(f"rollback to {version}")

        async def status(self) -> TrainerStatus:
            return replace(STATUS, doing=None, doing_s=0.0)

        async def steps(self, after: float) -> StepLog:
            return StepLog(steps=[each for each in self._fleet._log if each.at > after])

    def __getattr__(self, name: str) -> Any:
        """A call of the controller, which may have been restarted."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._fleet.controller, name)

    async def start(self) -> None:
        for name in ("replica-0", "replica-1"):
            self._fleet.add(TimedReplica(replica_id=name, incarnation=f"{name}-1"))
        await self._fleet.admitted("replica-0", "replica-1")

    async def publish(
        self, label: str | None = None, pause_s: float = 0.1, is_stored: bool = True
    ) -> RoundReport:
        """A round; it takes some times `pause_s`."""
        controller = self._fleet.controller
        lease = await controller.acquire("trainer")
        await controller.connect(lease.token, {})
        round_id = await controller.open_round(lease.token)
        await asyncio.sleep(pause_s)
        for _ in range(2):
            await controller.send(lease.token, round_id, {"segment": "a"})
            await asyncio.sleep(pause_s)
        report: RoundReport = await controller.close_round(lease.token, round_id, label)
        if is_stored:
            fleet_id = (await controller.fleet()).fleet_id
            manifest = VersionManifest(version=report.version, fleet_id=fleet_id, tensors={})
            with self._store.writing(report.version, fleet_id) as directory:
                (directory / MANIFEST).write_text(manifest.encode())
            await controller.stored(report.version, str(self._store.path_of(report.version)), label)
        await controller.release(lease.token)
        return report

    async def trainer_step(self) -> None:
        """The trainer reports its own figures, before the job does."""
        self._log.append(StepEntry(run="", step=1, values={"loss": 0.1, "entropy": 1.4}, at=time.time()))

    async def step(self) -> None:
        """The job made a step: the next point of each curve."""
        self._steps += 1
        step, chance = self._steps, self._random
        version = (await self._fleet.controller.fleet()).committed_version
        values: dict[str, float | int | bool | None] = {
            "reward": min(0.95, 0.2 + 0.03 * step + chance.uniform(-0.05, 0.05)),
            "reward_std": chance.uniform(0.2, 0.3),
            "cut_fraction": chance.uniform(0, 0.1),
            "answer_tokens_max": 128,
            "answer_tokens_mean": 80 + step + chance.uniform(-8, 8),
            "staleness_mean": chance.uniform(0, 1.5),
            "staleness_max": chance.randint(2, 3),
            "step_s": chance.uniform(3, 4),
            "wait_s": chance.uniform(0.5, 1),
            "reward/sums": 0.5,
            "trainer/step_s": 99.0,
            "trainer/loss": chance.uniform(-0.02, 0.02),
            "trainer/entropy": 1.4 - 0.01 * step,
            "trainer/rollout_kl": chance.uniform(0.001, 0.003),
            "trainer/logprob_difference_mean": chance.uniform(0.004, 0.006),
            "trainer/effective_sample_fraction": chance.uniform(0.85, 0.99),
        }
        if step % 5 == 0:
            values["evaluation/reward"] = min(0.95, 0.2 + 0.03 * step)
        samples = [
            RolloutSample(
                text=f"Step {step}: 17 + 25 = 42, because 17 + 20 = 37 and 37 + 5 = 42.\nThe answer is 42.",
                reward=float(number),
                versions=[(version - 1, 31), (version, 17)] if version else [(0, 48)],
            )
            for number in range(2)
        ]
        entry = StepEntry(run="grpo-20261128-163000", step=step, values=values, rollouts=samples)
        self._log.append(replace(entry, at=time.time()))

    def _made(self, directory: Path) -> TimedFleet:
        self._store = Store(directory / "store")
        return TimedFleet(directory, LedgerConfig(lease_s=30.0, outside_versions=False))

    async def replace(self, directory: Path) -> None:
        """Another fleet, which begins with version 0, has this address now."""
        old, self._fleet = self._fleet, self._made(directory)
        await self.start()
        await old.aclose()

    async def restart(self) -> None:
        """The controller's process is replaced."""
        await self._fleet.restart()

    async def aclose(self) -> None:
        self._generating.cancel()
        await self._server.close()
        await self._fleet.aclose()

    async def _generate(self) -> None:
        while True:
            for each in self._fleet.replicas.values():
                if each.admitted and not is_paused(each.condition):  # type: ignore[attr-defined]
                    each.generated += 0.05 * RATE * self._random.uniform(0.9, 1.1)  # type: ignore[attr-defined]
            await asyncio.sleep(0.05)

    async def _scrape(self, names: Sequence[str]) -> Scraped:
        def text(replica: Any) -> str:
            counts = {GENERATED: max(0, int(replica.generated)), RUNNING: 16, WAITING: 3, KV_CACHE: 0.42}
            drafts = f'{DRAFTED}{{version="3"}} 100\n{ACCEPTED}{{version="3"}} 61\n'
            return "".join(f'{name}{{engine="0"}} {value}\n' for name, value in counts.items()) + drafts

        return Scraped(replicas={name: text(each) for name, each in self._fleet.replicas.items()})


class _Prefixed:
    """A proxy that takes its path off."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(self._prefix)
        if path == scope["path"]:
            return await Response(status_code=404)(scope, receive, send)
        await self._app({**scope, "path": path or "/"}, receive, send)


class _Model:
    """What replicas answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: Response = JSONResponse({"data": [{"id": "SmolLM2-135M-Instruct"}]})
        if scope["path"] == "/v1/chat/completions":
            answer = StreamingResponse(_words(), media_type="text/event-stream")
        await answer(scope, receive, send)


async def _words() -> AsyncIterator[str]:
    words = ["The", "capital", "of", "France", "is", "Paris", "."]
    for number, word in enumerate(words):
        await asyncio.sleep(0.02)
        choice: dict[str, Any] = {"index": 0, "delta": {"content": f" {word}"}}
        if number == len(words) - 1:
            spans = ((3, 0, 4), (4, 4, 7))
            choice["weight_versions"] = [
                dict(zip(("version", "start", "end"), it, strict=True)) for it in spans
            ]
        yield f"data: {json.dumps({'choices': [choice]})}\n\n"
    yield "data: [DONE]\n\n"


class Running:
    """A `PageFleet` in a thread of its own, for tests that are no coroutines."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self._loop = LoopThread()
        self.run = self._loop.run
        self.fleet = self.run(self._made(directory, options))
        self.address: str = self.fleet.address

    async def _made(self, directory: Path, options: dict[str, Any]) -> PageFleet:
        fleet = PageFleet(directory, **options)
        await fleet.start()
        return fleet

    def close(self) -> None:
        self.run(self.fleet.aclose())
        self._loop.close()
