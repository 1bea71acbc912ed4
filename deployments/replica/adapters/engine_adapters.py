"""The adapters of one engine.

    load       the files are checked, then vLLM's `add_lora`; no request may name it yet
    make_live  requests may name these and no others
    drop       one that never became live

One that is live no more is removed after the last request that uses it. vLLM's `add_lora` runs on the
engine's thread, between two steps; what it needs of the disk is read before (`reading`).
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.host.logs import serve_logger
from deployments.protocol.adapters import Adapter, AdapterState, LoadedAdapter
from deployments.protocol.errors import PayloadRejected
from deployments.replica.adapters.reading import LAG_S, AdapterReader, last_line
from deployments.replica.adapters.worker_calls import WorkerCalls, Workers
from deployments.replica.spans import RECORDER


class Uses:
    """How many requests use which adapter, by id.

    Args:
        unused: called when the last request that used one has ended.
    """

    def __init__(self, unused: Callable[[int], None]) -> None:
        self._counts: Counter[int] = Counter()
        self._unused = unused

    def __getitem__(self, adapter_id: int) -> int:
        return self._counts[adapter_id]

    def begin(self, adapter_id: int) -> None:
        self._counts[adapter_id] += 1

    def end(self, adapter_id: int) -> None:
        self._counts[adapter_id] -= 1
        if not self._counts[adapter_id]:
            del self._counts[adapter_id]
            self._unused(adapter_id)

    @contextmanager
    def using(self, adapter_id: int) -> Iterator[None]:
        self.begin(adapter_id)
        try:
            yield
        finally:
            self.end(adapter_id)


class NamedAdapters(dict[str, LoRARequest]):
    """What vLLM's routes look a request's `model` up in, in place of a plain dictionary.

    The keys are what `/v1/models` lists: each live version by its full name, and each name. A look-up of a
    name returns its newest version, so the engine hears full names alone; and it counts as a use until the
    HTTP request ends, from the same moment on: no version goes between its look-up and its first token.
    """

    def __init__(self, uses: Uses) -> None:
        super().__init__()
        self._uses = uses
        self._newest: dict[str, LoRARequest] = {}

    def make_live(self, live: Sequence[Adapter]) -> None:
        """These, oldest first, and no others."""
        self.clear()
        self._newest = {}
        for adapter in live:
            request = lora_request(adapter)
            super().__setitem__(adapter.full_name, request)
            self._newest[adapter.full_name] = self._newest[adapter.name] = request
        for adapter in live:  # the newest is the last
            super().__setitem__(adapter.name, lora_request(adapter, name=adapter.name))

    def __getitem__(self, name: str) -> LoRARequest:
        recorder = RECORDER.get()
        if recorder is None:
            return self._newest[name]
        if name not in recorder.looked_up:  # all parts of a request have the same version
            found = recorder.looked_up[name] = self._newest[name]
            recorder.adapter = found.lora_name
            self._uses.begin(found.lora_int_id)
            recorder.at_end(lambda: self._uses.end(found.lora_int_id))
        looked_up: LoRARequest = recorder.looked_up[name]
        return looked_up


def lora_request(adapter: Adapter, name: str | None = None) -> LoRARequest:
    """vLLM's request for a version. It never loads in place: what is loaded under an id stays."""
    return LoRARequest(
        lora_name=adapter.full_name if name is None else name,
        lora_int_id=adapter.adapter_id,
        lora_path=adapter.path,
        is_3d_lora_weight=adapter.is_3d,
    )


logger = serve_logger()


class EngineAdapters:
    """What an engine holds, and what requests may name.

    Args:
        llm: vLLM's `AsyncLLM`.
        workers: calls a method of every worker.
        models: the application's `OpenAIServingModels`; None: it has no routes with models.
    """

    def __init__(self, llm: Any, workers: Workers, models: Any = None, lag_s: float = LAG_S) -> None:
        self._llm = llm
        self._calls = WorkerCalls(workers)
        self.reader = AdapterReader(llm, self._calls, lag_s)
        self._held: dict[int, Adapter] = {}
        self._from_received: set[int] = set()  # ids
        self._live: tuple[int, ...] = ()
        self._doomed: set[int] = set()
        self._removals: dict[int, asyncio.Task[None]] = {}
        self.uses = Uses(self._remove_unused)
        self.named = NamedAdapters(self.uses)
        if models is not None:
            models.lora_requests = self.named
            models.lora_resolvers = []  # they load into one engine, under ids that are the fleet's

    async def connect(self) -> None:
        """Once the engine is up: loads wait for fewer of its steps from then on."""
        if self._takes_adapters:
            await self._calls.connect()

    def close(self) -> None:
        """The engine ends."""
        self._calls.close()

    @property
    def _takes_adapters(self) -> bool:
        return getattr(self._llm.vllm_config, "lora_config", None) is not None

    @property
    def state(self) -> AdapterState:
        return AdapterState(
            held=tuple(self._held), live=self._live, received=tuple(sorted(self._from_received))
        )

    async def load(self, adapter: Adapter) -> LoadedAdapter:
        """Check the files and load them into the engine.

        Raises:
            PayloadRejected: they do not fit, or are not there in time; the engine is as it was.
            Exception: the engine failed.
        """
        if not self._takes_adapters:
            raise PayloadRejected("this engine was started without 'enable_lora'")
        if adapter.adapter_id in self._held:  # an id stands for the same files always
            self._doomed.discard(adapter.adapter_id)
            return LoadedAdapter(read_s=0.0, add_s=0.0)
        began = time.perf_counter()
        try:
            received = await self.reader.read(adapter)
            read = time.perf_counter()
            await self._llm.add_lora(lora_request(adapter))
        except EngineDeadError:
            raise
        except PayloadRejected:
            await self.reader.forget(adapter)
            raise
        except Exception as error:  # whatever a worker said; some workers may have it
            await self.reader.forget(adapter)
            await self._llm.remove_lora(adapter.adapter_id)
            raise PayloadRejected(f"{adapter.full_name}: vLLM cannot load it: {last_line(error)}") from error
        self._held[adapter.adapter_id] = adapter
        if received:
            self._from_received.add(adapter.adapter_id)
        return LoadedAdapter(read_s=read - began, add_s=time.perf_counter() - read)

    async def make_live(self, live: Sequence[Adapter]) -> None:
        """Requests may name these and no others.

        Raises:
            RuntimeError: one is not loaded.
        """
        missing = [each.full_name for each in live if each.adapter_id not in self._held]
        if missing:
            raise RuntimeError(f"{missing} are not loaded")
        before, self._live = self._live, tuple(each.adapter_id for each in live)
        self._doomed -= set(self._live)
        self.named.make_live(live)
        await self._doom(set(before) - set(self._live))

    async def drop(self, adapter_id: int) -> None:
        """Unload one that is not live."""
        if adapter_id in self._live:
            raise RuntimeError(f"adapter {adapter_id} is live")
        await self._doom({adapter_id})

    async def _doom(self, ids: set[int]) -> None:
        self._doomed |= ids & self._held.keys()
        for adapter_id in [each for each in self._doomed if not self.uses[each]]:
            await self._remove(adapter_id)

    def _remove_unused(self, adapter_id: int) -> None:
        if adapter_id in self._doomed and adapter_id not in self._removals:
            removal = asyncio.get_running_loop().create_task(self._remove(adapter_id))
            self._removals[adapter_id] = removal
            removal.add_done_callback(lambda _: self._removals.pop(adapter_id, None))

    async def _remove(self, adapter_id: int) -> None:
        if adapter_id not in self._doomed or self.uses[adapter_id]:
            return
        self._doomed.discard(adapter_id)
        try:
            await self._llm.remove_lora(adapter_id)
        except EngineDeadError:  # it holds nothing any more
            logger.debug("adapter %d ends with its engine", adapter_id)
        self._held.pop(adapter_id, None)
        self._from_received.discard(adapter_id)
        _forget_figures(self._llm)


def _forget_figures(llm: Any) -> None:
    """vLLM keeps a figure for each set of names that it has ever seen running together, for ever."""
    manager = getattr(llm, "logger_manager", None)
    for logger in [] if manager is None else manager.stat_loggers:
        clear = getattr(getattr(logger, "gauge_lora_info", None), "clear", None)
        if clear is not None:
            clear()  # those that run now are there again with the next step
