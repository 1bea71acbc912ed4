"""vLLM's engine core, as far as pauses, sleeps, drains and commits reach it."""

import asyncio
from types import SimpleNamespace
from typing import Any

from deployments.replica.engine_core import COMMIT


class Core:
    """Stands where vLLM's engine core client does; `running` is what its scheduler would do."""

    def __init__(self) -> None:
        self.running = True  # begins requests
        self.generating = 0
        self.did: list[str] = []
        self.asleep: set[str] = set()

    async def pause_scheduler_async(self, **options: Any) -> None:
        self.running = False

    async def set_weight_version_async(self, version: str) -> None:
        self.did.append("version")

    async def resume_scheduler_async(self) -> None:
        self.did.append("resume")
        assert not self.asleep, "a step without its memory ends the engine"
        self.running = True

    async def call_utility_all_async(self, method: str, *arguments: bool) -> list[int]:
        # As vLLM's: a task for each engine, which sends its message later than who calls one engine at once.
        return list(await asyncio.gather(self._call(method, *arguments)))

    async def _call(self, method: str, *arguments: bool) -> int:
        self.did.append(method)
        match method:
            case "slipstream_drain":
                assert not self.asleep, "a step without its memory ends the engine"
                self.running = False
            case "slipstream_end_drain":
                self.running = not arguments[0]
        return self.generating

    async def call_utility_async(self, method: str, *arguments: Any) -> float:
        if method != COMMIT:
            return await self._call(method, *arguments)
        _, _, resume = arguments
        self.running = False
        if resume:
            await self.resume_scheduler_async()
        return 0.0


class Llm:
    """Stands where an AsyncLLM does."""

    def __init__(self) -> None:
        self.engine_core = Core()
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.engine_core.running = False

    async def sleep(self, level: int, mode: str) -> None:
        self.engine_core.running = False
        if level:
            self.engine_core.asleep = {"weights", "kv_cache"}

    async def wake_up(self, tags: list[str] | None) -> bool:
        core = self.engine_core
        # vLLM's executor does nothing, with a warning, if one of the named parts is awake.
        if tags is None or set(tags) - {"scheduling"} <= core.asleep:
            core.asleep -= set(core.asleep if tags is None else tags)
        if not core.asleep:
            core.running = True
        return not core.asleep

    async def collective_rpc(self, method: str, kwargs: Any) -> list[Any]:
        self.engine_core.did.append(method)
        return [None]
