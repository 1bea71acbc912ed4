"""What `deployments.replica.adapters` does, over an engine without tensors.

Files are compared with their digest and read in a thread. What the engine forgets, as with a swap, it reads
again from the fleet's copy with the next token that needs it, as vLLM does, which compares nothing then.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deployments.protocol.adapters import Adapter, AdapterState, DropAdapter, LoadAdapter, SetAdapters
from deployments.protocol.errors import NotFound, PayloadRejected
from deployments.weights.store.adapter_store import adapter_digest
from tests.simulation.adapters.files import MAX_RANK, read_content, read_rank
from tests.simulation.work import EngineFailed, Work

LAG_S = 2.0
RETRY_S = 0.1
KINDS = (LoadAdapter, SetAdapters, DropAdapter)


class Observer:
    """Learns what an engine does."""

    def went_live(self, adapter: Adapter, content: str) -> None:
        """Requests may name it now; what its files held."""

    def unreadable(self, adapter: Adapter) -> None:
        """The files of one that is held are gone: vLLM's engine dies of that."""


class SimAdapters:
    """What one engine holds, and what requests may name."""

    def __init__(self, work: Work, observer: Observer | None = None) -> None:
        self._work = work
        self._observer = Observer() if observer is None else observer
        self._held: dict[int, Adapter] = {}
        self._contents: dict[int, str] = {}  # of those that the engine has not forgotten
        self._live: tuple[Adapter, ...] = ()
        self._doomed: set[int] = set()
        self._uses: Counter[int] = Counter()
        self._removals: dict[int, asyncio.Task[None]] = {}

    @property
    def state(self) -> AdapterState:
        return AdapterState(held=tuple(self._held), live=tuple(each.adapter_id for each in self._live))

    @property
    def names(self) -> list[str]:
        """The full names that requests may use."""
        return [each.full_name for each in self._live]

    # -- instructions -------------------------------------------------------------------------

    async def carry_out(self, body: LoadAdapter | SetAdapters | DropAdapter, *, asleep: bool) -> None:
        match body:
            case LoadAdapter():
                if asleep:
                    raise PayloadRejected("its weights sleep")
                await self._load(body.adapter)
            case SetAdapters():
                await self._make_live(body.live)
            case DropAdapter():
                if any(each.adapter_id == body.adapter_id for each in self._live):
                    raise RuntimeError(f"adapter {body.adapter_id} is live")
                await self._doom({body.adapter_id})

    async def _load(self, adapter: Adapter) -> None:
        adapter_id, directory = adapter.adapter_id, Path(adapter.path)
        if adapter_id in self._held:
            self._doomed.discard(adapter_id)
            return
        await self._check(adapter, directory)
        await self._work.do(0.1)
        if self._work.flip and self._work.rng.random() < self._work.flip:
            raise PayloadRejected(f"{adapter.full_name} is damaged")
        self._contents[adapter_id] = read_content(directory)
        self._held[adapter_id] = adapter

    async def _check(self, adapter: Adapter, directory: Path) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + LAG_S
        while True:
            try:
                if await asyncio.to_thread(adapter_digest, directory) == adapter.digest:
                    break
                problem = f"{directory.name} has another digest"
            except OSError as error:
                problem = f"{directory.name} cannot be read: {error.strerror}"
            if loop.time() > until:
                raise PayloadRejected(problem)
            await asyncio.sleep(RETRY_S)
        if read_rank(directory) > MAX_RANK:
            raise PayloadRejected(f"{adapter.full_name}: expected at most max_lora_rank, {MAX_RANK}")

    async def _make_live(self, live: Sequence[Adapter]) -> None:
        missing = [each.full_name for each in live if each.adapter_id not in self._held]
        if missing:
            raise RuntimeError(f"{missing} are not loaded")
        before, self._live = self._live, tuple(live)
        self._doomed -= {each.adapter_id for each in live}
        for each in live:
            self._observer.went_live(each, self._content(each))
        await self._doom({each.adapter_id for each in before} - {each.adapter_id for each in live})

    async def _doom(self, ids: set[int]) -> None:
        self._doomed |= ids & self._held.keys()
        for adapter_id in sorted(each for each in self._doomed if not self._uses[each]):
            await self._remove(adapter_id)

    async def _remove(self, adapter_id: int) -> None:
        if adapter_id not in self._doomed or self._uses[adapter_id]:
            return
        self._doomed.discard(adapter_id)
        await self._work.do(0.01)
        self._held.pop(adapter_id, None)
        self._contents.pop(adapter_id, None)

    def forget(self) -> None:
        """The engine's weights were replaced: what it has of adapters is gone."""
        self._contents.clear()

    # -- requests -----------------------------------------------------------------------------

    @contextmanager
    def using(self, name: str) -> Iterator[Callable[[], tuple[str, str]]]:
        """A request that names an adapter: what computes a token, and says with which version and files.

        Raises:
            NotFound: requests may not name it.
        """
        found = [each for each in self._live if name in (each.name, each.full_name)]
        if not found:
            raise NotFound(f"The model '{name}' does not exist.")
        adapter = found[-1]
        self._uses[adapter.adapter_id] += 1
        try:
            yield lambda: (adapter.full_name, self._content(adapter))
        finally:
            self._uses[adapter.adapter_id] -= 1
            self._remove_unused(adapter.adapter_id)

    def _remove_unused(self, adapter_id: int) -> None:
        if self._uses[adapter_id] or adapter_id not in self._doomed or adapter_id in self._removals:
            return
        removal = asyncio.get_running_loop().create_task(self._remove(adapter_id))
        self._removals[adapter_id] = removal
        removal.add_done_callback(lambda _: self._removals.pop(adapter_id, None))

    def _content(self, adapter: Adapter) -> str:
        if adapter.adapter_id not in self._contents:
            try:
                self._contents[adapter.adapter_id] = read_content(Path(adapter.path))
            except OSError as error:
                self._observer.unreadable(adapter)
                raise EngineFailed(f"{adapter.full_name} cannot be read again") from error
        return self._contents[adapter.adapter_id]
