"""The simulation's engine does with adapters what the real one does, whatever comes in whatever order."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from deployments.protocol.adapters import Adapter, DropAdapter, LoadAdapter, SetAdapters
from deployments.protocol.errors import PayloadRejected
from deployments.replica.adapters.engine_adapters import EngineAdapters
from deployments.weights.store.adapter_store import TENSORS, adapter_digest
from tests.deployments.replica.adapters.fake_llm import FakeLlm
from tests.simulation.adapters import engine
from tests.simulation.adapters.engine import SimAdapters
from tests.simulation.work import Work
from tests.tiny_adapters import save_tiny_adapter
from tests.tiny_models import save_tiny_llama

SEQUENCES, LENGTH = 150, 20
KINDS = ["load"] * 3 + ["set"] * 2 + ["drop"] + ["use"] * 2 + ["end"]
Order = tuple[str, int]


class AtOnce(Work):
    async def do(self, usually_s: float) -> None:
        await asyncio.sleep(0)


class Real:
    """`EngineAdapters` over a fake of vLLM."""

    def __init__(self, model: str) -> None:
        llm = FakeLlm(model)
        self.adapters = EngineAdapters(llm, llm.workers, SimpleNamespace(lora_requests={}), lag_s=0.0)

    async def carry_out(self, body: Any) -> None:
        match body:
            case LoadAdapter():
                await self.adapters.load(body.adapter)
            case SetAdapters():
                await self.adapters.make_live(body.live)
            case DropAdapter():
                await self.adapters.drop(body.adapter_id)

    def use(self, adapter: Adapter, stack: ExitStack) -> None:
        stack.enter_context(self.adapters.uses.using(adapter.adapter_id))


class Simulated:
    def __init__(self) -> None:
        self.adapters = SimAdapters(AtOnce(rng=Random(0)))

    async def carry_out(self, body: Any) -> None:
        await self.adapters.carry_out(body, asleep=False)

    def use(self, adapter: Adapter, stack: ExitStack) -> None:
        stack.enter_context(self.adapters.using(adapter.full_name))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_llama(tmp_path_factory.mktemp("model"), 1))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Adapter]:
    """Three that fit, two of them of one name; one of a rank that is too high, damaged files, none at all."""
    root = tmp_path_factory.mktemp("adapters")
    made = []
    for number, (name, rank) in enumerate([("a", 4), ("a", 4), ("b", 4), ("c", 16), ("d", 4), ("e", 4)], 1):
        directory = save_tiny_adapter(root / str(number), number, rank=rank)
        save_file(load_file(directory / TENSORS), directory / TENSORS, metadata={"content": str(number)})
        digest = adapter_digest(directory) if name != "d" else "0" * 64
        path = directory if name != "e" else Path(root / "none")
        made.append(
            Adapter(name=name, version=number, adapter_id=number, path=str(path), digest=digest, size_bytes=1)
        )
    return made


async def seen(subject: Real | Simulated, adapters: Sequence[Adapter], orders: Sequence[Order]) -> list[Any]:
    """What each order was answered with, and what is held and live afterwards."""
    found: list[Any] = []
    using: list[ExitStack] = []
    for kind, number in orders:
        adapter, answer, state = adapters[number % len(adapters)], "done", subject.adapters.state
        within = adapters if number % 8 == 0 else [each for each in adapters if each.adapter_id in state.held]
        try:
            match kind:
                case "load":
                    await subject.carry_out(LoadAdapter(adapter=adapter))
                case "set":
                    live = tuple(each for bit, each in enumerate(within) if number >> bit & 1)
                    await subject.carry_out(SetAdapters(live=live))
                case "drop":
                    await subject.carry_out(DropAdapter(adapter_id=adapter.adapter_id))
                case "use" if state.live:
                    used = adapters[state.live[number % len(state.live)] - 1]
                    using.append(ExitStack())
                    subject.use(used, using[-1])
                case "end" if using:
                    using.pop(0).close()
        except (PayloadRejected, RuntimeError) as error:
            answer = type(error).__name__
        for _ in range(4):
            await asyncio.sleep(0)
        found.append((kind, number, answer, subject.adapters.state))
    for each in using:
        each.close()
    await asyncio.sleep(0.01)
    return [*found, subject.adapters.state]


@pytest.mark.slow
async def test_no_random_sequence_tells_the_simulations_engine_from_the_real_one(
    model: str, adapters: Sequence[Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LAG_S", 0.0)
    rng, answers = Random(1), set()
    for _ in range(SEQUENCES):
        orders = [(rng.choice(KINDS), rng.randrange(64)) for _ in range(LENGTH)]
        real = await seen(Real(model), adapters, orders)
        assert await seen(Simulated(), adapters, orders) == real, orders
        answers |= {(kind, answer) for kind, _, answer, _ in real[:-1]}
    # Otherwise the sequences show nothing.
    assert answers >= {
        ("load", "done"),
        ("load", "PayloadRejected"),
        ("set", "done"),
        ("set", "RuntimeError"),
    }
    assert answers >= {("drop", "done"), ("drop", "RuntimeError")}
