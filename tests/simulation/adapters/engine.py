"""`EngineAdapters` over an engine without tensors.

What the engine forgets, as with a swap, it reads again from the fleet's copy with the next token that needs
it, as vLLM does, which compares nothing then.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deployments.protocol.adapters import Adapter, LoadAdapter, SetAdapters
from deployments.protocol.errors import NotFound, PayloadRejected
from deployments.replica.adapters.engine_adapters import EngineAdapters
from deployments.weights.store.adapter_store import Incomplete, adapter_digest, until_complete
from tests.simulation.adapters.files import MAX_RANK, read_content, read_rank
from tests.simulation.adapters.oracle import AdapterOracle
from tests.simulation.work import EngineFailed, Work

LAG_S = 2.0


class _Engine:
    """What vLLM does, and the reader of files."""

    vllm_config = SimpleNamespace(lora_config=MAX_RANK)

    def __init__(self, work: Work) -> None:
        self._work = work
        self.contents: dict[int, str] = {}  # of those that it has not forgotten

    async def read(self, adapter: Adapter) -> bool:
        directory = Path(adapter.path)

        async def check() -> None:
            if await asyncio.to_thread(adapter_digest, directory) != adapter.digest:
                raise Incomplete(f"{directory.name} has another digest")

        try:
            await until_complete(check, LAG_S, asyncio.get_running_loop().time)
        except (OSError, ValueError) as error:
            raise PayloadRejected(str(error)) from error
        if read_rank(directory) > MAX_RANK:
            raise PayloadRejected(f"{adapter.full_name}: expected at most max_lora_rank, {MAX_RANK}")
        return False

    async def forget(self, adapter: Adapter) -> None: ...

    async def add_lora(self, request: Any) -> None:
        await self._work.do(0.1)
        if self._work.flip and self._work.rng.random() < self._work.flip:
            raise PayloadRejected(f"{request.lora_name} is damaged")
        self.contents[request.lora_int_id] = read_content(Path(request.lora_path))

    async def remove_lora(self, adapter_id: int) -> None:
        await self._work.do(0.01)
        self.contents.pop(adapter_id, None)


class SimAdapters(EngineAdapters):
    """What one engine holds, and what requests may name; the oracle learns of it."""

    def __init__(self, work: Work, oracle: AdapterOracle) -> None:
        self._engine, self._oracle = _Engine(work), oracle
        super().__init__(self._engine, _no_workers)
        self.reader: Any = self._engine

    @property
    def names(self) -> list[str]:
        """The full names that requests may use."""
        return [self._held[each].full_name for each in self._live]

    async def carry_out(self, body: LoadAdapter | SetAdapters, *, asleep: bool) -> None:
        match body:
            case LoadAdapter():
                if asleep:
                    raise PayloadRejected("its weights sleep")
                await self.load(body.adapter)
            case SetAdapters():
                await self.make_live(body.live, body.keep)

    async def make_live(self, live: Sequence[Adapter], keep: Sequence[int] = ()) -> None:
        if all(each.adapter_id in self._held for each in live):
            for each in live:
                self._oracle.went_live(each, self._content(each))
        await super().make_live(live, keep)

    def forget(self) -> None:
        """The engine's weights were replaced: what it has of adapters is gone."""
        self._engine.contents.clear()

    @contextmanager
    def using(self, name: str) -> Iterator[Callable[[], tuple[str, str]]]:
        """A request that names an adapter: what computes a token, and says with which version and files.

        Raises:
            NotFound: requests may not name it.
        """
        try:
            adapter = self._held[self.named[name].lora_int_id]
        except KeyError:
            raise NotFound(f"The model '{name}' does not exist.") from None
        with self.uses.using(adapter.adapter_id):
            yield lambda: (adapter.full_name, self._content(adapter))

    def _content(self, adapter: Adapter) -> str:
        contents = self._engine.contents
        if adapter.adapter_id not in contents:
            try:
                contents[adapter.adapter_id] = read_content(Path(adapter.path))
            except OSError as error:
                self._oracle.unreadable(adapter)
                raise EngineFailed(f"{adapter.full_name} cannot be read again") from error
        return contents[adapter.adapter_id]


async def _no_workers(method: str, **arguments: Any) -> Any:
    raise AssertionError(f"the simulation's engine has no workers to ask for {method}")
