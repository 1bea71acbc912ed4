"""The adapters of one engine.

    load       checks the files, then vLLM's `add_lora`; requests cannot select it yet
    make_live  requests can select these and no others; what need not stay goes

An adapter is removed after the last request that uses it. vLLM's `add_lora` runs between two steps;
the workers read the files beforehand, while the engine decodes.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.host.logs import serve_logger
from deployments.protocol.adapters import Adapter, LoadedAdapter
from deployments.protocol.errors import PayloadRejected
from deployments.replica.adapter_check import check_adapter
from deployments.replica.spans import RECORDER
from deployments.replica.worker_calls import Workers
from deployments.weights.store.adapter_store import LAG_S, until_complete
from deployments.weights.store.hub import cached, complete_schema
from deployments.weights.wire.checkpoint_schema import Schema

READ_POLL_S = 0.01


class Uses:
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
    """Replaces vLLM's dictionary from a request's `model` to an adapter.

    Keys, listed by `/v1/models`: full names of live versions, and names, which mean their newest version. A
    look-up counts as a use until the HTTP request ends: no version is removed before its first token.
    """

    def __init__(self, uses: Uses) -> None:
        super().__init__()
        self._uses = uses
        self._newest: dict[str, LoRARequest] = {}

    def make_live(self, live: Sequence[Adapter]) -> None:
        """`live` is oldest first."""
        self.clear()
        self._newest = {}
        for adapter in live:
            request = lora_request(adapter)
            super().__setitem__(adapter.full_name, request)
            self._newest[adapter.full_name] = self._newest[adapter.name] = request
        for adapter in live:
            super().__setitem__(adapter.name, lora_request(adapter, name=adapter.name))

    def __getitem__(self, name: str) -> LoRARequest:
        recorder = RECORDER.get()
        if recorder is None:
            return self._newest[name]
        if name not in recorder.looked_up:  # all parts of a request use one version
            found = recorder.looked_up[name] = self._newest[name]
            recorder.adapter = found.lora_name
            self._uses.begin(found.lora_int_id)
            recorder.at_end(lambda: self._uses.end(found.lora_int_id))
        return recorder.looked_up[name]


def lora_request(adapter: Adapter, name: str | None = None) -> LoRARequest:
    """Never `load_inplace`: an id's files never change."""
    return LoRARequest(
        lora_name=adapter.full_name if name is None else name,
        lora_int_id=adapter.adapter_id,
        lora_path=adapter.path,
        is_3d_lora_weight=adapter.is_3d,
    )


logger = serve_logger()


class EngineAdapters:
    """Waits up to `lag_s` for files that differ from the fleet's copy."""

    def __init__(self, llm: Any, calls: Workers, models: Any = None, lag_s: float = LAG_S) -> None:
        self._llm = llm
        self._calls = calls
        self._lag_s = lag_s
        self._held: dict[int, Adapter] = {}
        self.live_ids: tuple[int, ...] = ()
        self._wanted: set[int] = set()
        self._removals: dict[int, asyncio.Task[None]] = {}
        self.uses = Uses(self._remove_unused)
        self.named = NamedAdapters(self.uses)
        if models is not None:
            models.lora_requests = self.named
            models.lora_resolvers = []  # they would load into this engine only, with colliding ids

    @property
    def held(self) -> tuple[int, ...]:
        return tuple(self._held)

    @property
    def live(self) -> list[LoRARequest]:
        return [lora_request(self._held[adapter_id]) for adapter_id in self.live_ids]

    async def load(self, adapter: Adapter) -> LoadedAdapter:
        """Raises PayloadRejected: the engine is unchanged."""
        if getattr(self._llm.vllm_config, "lora_config", None) is None:
            raise PayloadRejected("this engine was started without 'enable_lora'")
        if adapter.adapter_id in self._held:  # an id's files never change
            self._wanted.add(adapter.adapter_id)
            return LoadedAdapter(read_s=0.0, add_s=0.0)
        began = time.perf_counter()
        try:
            await self._read(adapter)
            read = time.perf_counter()
            await self._llm.add_lora(lora_request(adapter))
        except EngineDeadError:
            raise
        except PayloadRejected:
            await self._forget(adapter)
            raise
        except Exception as error:  # other workers may have loaded it
            await self._forget(adapter)
            await self._llm.remove_lora(adapter.adapter_id)
            raise PayloadRejected(f"{adapter.full_name}: vLLM cannot load it: {_last_line(error)}") from error
        self._held[adapter.adapter_id] = adapter
        self._wanted.add(adapter.adapter_id)
        return LoadedAdapter(read_s=read - began, add_s=time.perf_counter() - read)

    async def make_live(self, live: Sequence[Adapter], keep: Sequence[int] = ()) -> None:
        """Remove all but these and `keep` (ids) once unused. Raises RuntimeError if one is not loaded."""
        missing = [each.full_name for each in live if each.adapter_id not in self._held]
        if missing:
            raise RuntimeError(f"{missing} are not loaded")
        self.live_ids = tuple(each.adapter_id for each in live)
        self._wanted = {*self.live_ids, *keep}
        self.named.make_live(live)
        for adapter_id in sorted(self._held.keys() - self._wanted):
            await self._remove(adapter_id)

    def _remove_unused(self, adapter_id: int) -> None:
        if adapter_id in self._held and adapter_id not in self._wanted | self._removals.keys():
            removal = asyncio.get_running_loop().create_task(self._remove(adapter_id))
            self._removals[adapter_id] = removal
            removal.add_done_callback(lambda _: self._removals.pop(adapter_id, None))

    async def _remove(self, adapter_id: int) -> None:
        if adapter_id in self._wanted or self.uses[adapter_id]:
            return
        try:
            await self._llm.remove_lora(adapter_id)
        except EngineDeadError:
            logger.debug("adapter %d is gone with its engine", adapter_id)
        self._held.pop(adapter_id, None)
        _forget_figures(self._llm)

    async def _read(self, adapter: Adapter) -> None:
        await self._begin(adapter)
        if not await self._check(adapter):
            await self._begin(adapter)  # the workers may have read the files before they were complete
        while not all(await self._calls("adapter_is_read", adapter_id=adapter.adapter_id)):
            await asyncio.sleep(READ_POLL_S)

    async def _forget(self, adapter: Adapter) -> None:
        await self._calls("adapter_forget", adapter_id=adapter.adapter_id)

    async def _begin(self, adapter: Adapter) -> None:
        await self._calls(
            "adapter_read", adapter_id=adapter.adapter_id, path=adapter.path, is_3d=adapter.is_3d
        )

    async def _check(self, adapter: Adapter) -> bool:
        """False: the files were incomplete at first."""
        attempts = 0

        async def check() -> None:
            nonlocal attempts
            attempts += 1
            await asyncio.to_thread(self._check_files, adapter)

        try:
            await until_complete(check, self._lag_s)
        except (OSError, ValueError) as error:
            raise PayloadRejected(str(error)) from error
        return attempts == 1

    def _check_files(self, adapter: Adapter) -> None:
        check_adapter(adapter, self._base, self._llm.vllm_config.lora_config)

    @cached_property
    def _base(self) -> Schema | None:
        config = self._llm.model_config
        directory = cached(config.model, config.revision, self._llm.vllm_config.load_config.download_dir)
        return complete_schema(directory, of_hub=directory != Path(config.model))


def _forget_figures(llm: Any) -> None:
    """vLLM's LoRA gauge keeps a series for every set of names that ever ran together."""
    manager = getattr(llm, "logger_manager", None)
    for logger in [] if manager is None else manager.stat_loggers:
        clear = getattr(getattr(logger, "gauge_lora_info", None), "clear", None)
        if clear is not None:
            clear()  # running ones reappear with the next step


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"
